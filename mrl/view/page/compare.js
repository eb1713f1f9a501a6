// The curves of several runs, one chart for each metric.

document.getElementById("curves").append(DATA.charts.length
  ? h("div", { class: "grid" }, DATA.charts.map((spec) => chart({ ...spec, format: formatOf(spec.title) })))
  : h("p", { class: "note" }, "No run has a metric that is compared."));
