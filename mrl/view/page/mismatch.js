// Compare the log-probs and routes of engine and trainer: over the steps, by layer, and by which routes are replayed.

const FAMILY_NAMES = {
  "routing/disagreement": "router disagreement",
  "routing/margin_at_disagreement": "router margin where routes differ",
  "moe/load_entropy": "entropy of the expert load",
  "moe/load_max": "largest expert load",
  "moe/dead_experts": "experts without a token",
};
const MAX_COLUMNS = 240;

function mismatchDashboard() {
  return h("div", {},
    h("p", { class: "note" }, "\u0394 is the trainer's log-prob before the update less the engine's, on tokens of the loss."),
    chartGrid(MISMATCH),
    h("div", { class: "blocks" }, layerHeatmap(), expertLoad()), decomposition());
}

/** Return, for each metric with keys NAME/layer_NN, its [{layer, series}, ...] in the order of layers, by NAME. */
function layerFamilies() {
  const families = new Map();
  for (const key of Object.keys(SERIES)) {
    const match = /^(.*)\/layer_(\d+)$/.exec(key);
    if (match) families.set(match[1], [...(families.get(match[1]) || []), { layer: Number(match[2]), series: SERIES[key] }]);
  }
  for (const rows of families.values()) rows.sort((a, b) => a.layer - b.layer);
  return families;
}

function layerHeatmap() {
  const families = layerFamilies();
  if (!families.size) return h("p", { class: "note" }, "No metrics by layer in this run.");
  const names = [...Object.keys(FAMILY_NAMES).filter((name) => families.has(name)), ...[...families.keys()].filter((name) => !FAMILY_NAMES[name])];
  const place = h("div", {});
  const show = (name) => place.replaceChildren(familyMap(name, families.get(name)));
  const choice = select("By layer and step:", names.map((name) => [name, FAMILY_NAMES[name] || name]), show);
  show(names[0]);
  return h("div", { class: "block" }, h("h3", {}, "Layers"), choice.element, place,
    h("p", { class: "note" }, "A click on a cell, or Enter, opens the samples of its step where the page has them; of a column of several steps, those of the one with the largest value among these."));
}

/** Make the heatmap of a metric by layer and step. In a long run, a column has the largest values of several steps. */
function familyMap(name, rows) {
  const size = Math.ceil(STEPS.length / MAX_COLUMNS);
  const columns = STEPS.filter((_, i) => i % size === 0);
  const place = new Map(STEPS.map((step, i) => [step, Math.floor(i / size)]));
  const cells = rows.map(({ series }) => {
    const line = columns.map(() => null);
    stepsOf(series).forEach((step, i) => {
      const [at, value] = [place.get(step), series.v[i]];
      if (value !== null && (line[at] === null || value > line[at])) line[at] = value;
    });
    return line;
  });
  const toOpen = (row, column) => stepToOpen(rows[row].series, (step) => place.get(step) === column);
  return heatmap({
    title: `${name}${size > 1 ? `, largest of ${size} steps` : ""}`,
    rows: rows.map((row) => String(row.layer)), columns: columns.map(String), rowName: "layer", columnName: "step",
    value: (row, column) => cells[row][column],
    remark: (row, column) => {
      const step = toOpen(row, column);
      if (step === null) return "; no samples in the page";
      return size > 1 ? `; samples of step ${step}` : "";
    },
    onPick: (row, column) => browser.goTo(toOpen(row, column)),
  });
}

/** Return the step with the largest value, of those that have samples in the page and that `fits` accepts; null if there is none. */
function stepToOpen(series, fits) {
  const steps = stepsOf(series);
  const valueAt = (step) => {
    const at = nearest(steps, step);
    return steps[at] === step ? series.v[at] ?? -Infinity : -Infinity;
  };
  const found = DATA.steps.map(({ step }) => step).filter(fits);
  return found.length ? found.reduce((best, step) => (valueAt(step) > valueAt(best) ? step : best)) : null;
}

function decomposition() {
  const all = DATA.diagnosis.filter((found) => found && found.levels);
  if (!all.length) return h("p", { class: "note" }, "No decomposition of the gap in this run (diagnosis.decompose_every).");
  const place = h("div", {});
  const show = (i) => place.replaceChildren(decomposed(all[i]));
  const choice = select("Step:", all.map((found, i) => [i, String(found.step)]), show);
  choice.box.value = String(all.length - 1);
  show(all.length - 1);
  return h("div", { class: "block", id: "decomposition" }, h("h3", {}, "Where the gap comes from"), choice.element, place);
}

const LEVELS = { none: "no replay", ids: "replay of expert ids", weights: "replay of ids and weights", quantized: "replay of ids, quantised weights" };

function decomposed(found) {
  const columns = ["logprob_abs_mean", "k3", "extreme_share"];
  const levels = Object.entries(found.levels);
  const layers = Array.isArray(found.layers) ? found.layers : [];
  const first = found.first_divergent_layer;
  return h("div", {}, h("div", { class: "blocks" },
    h("div", { class: "scroll" }, h("table", {},
      h("caption", {}, `Gap by what is replayed, ${number(found.num_tokens)} tokens`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "level"), columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, levels.map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, LEVELS[name] || name),
        columns.map((column) => h("td", {}, number(values && values[column])))))))),
    gapByCause(found.parts || {}, columns),
    layers.length ? layerBars(layers, first) : null),
    h("p", { class: "note" }, first === null || first === undefined ? "No layer where activations diverge." : `Activations diverge first in layer ${first}.`));
}

/** Make a table of the parts of each measure: by routes, by the engine's quantised weights, and the rest. */
function gapByCause(parts, measures) {
  const rows = measures.filter((name) => parts[name]);
  if (!rows.length) return null;
  const causes = Object.keys(parts[rows[0]]);
  return h("div", { class: "scroll" }, h("table", {},
    h("caption", {}, "Gap by cause"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "measure"), causes.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((name) => h("tr", {}, h("th", { scope: "row" }, name), causes.map((cause) => h("td", {}, number(parts[name][cause]))))))),
  h("p", { class: "note" }, "routes: what the replay of expert ids removes from the gap."
    + (causes.includes("quantization") ? " quantization: what the engine's quantised weights remove after that. rest: what remains, from the engine's quantised inputs and rounding." : "")));
}

/** Make a table with one bar per layer and measure. The longest bar of a measure fills its column. */
function layerBars(layers, first) {
  const kinds = [["gap_without", "gap, all replayed but this"], ["gap_first", "gap, replayed up to this"], ["hidden_rel_diff", "difference of hidden states, relative"]];
  const largest = kinds.map(([name]) => Math.max(0, ...layers.map((layer) => Math.abs(layer[name] ?? 0))));
  const bar = (value, most, i) => {
    const inner = h("span", { class: `bar c${i}` });
    inner.style.width = `${most > 0 ? (100 * Math.abs(value ?? 0)) / most : 0}%`;
    return h("td", { class: "bar-cell" }, h("span", { class: "bar-room" }, inner), h("span", { class: "bar-number" }, number(value)));
  };
  return h("div", { class: "scroll tall", tabindex: "0" }, h("table", { class: "bars" },
    h("caption", {}, "By layer"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"), kinds.map(([, text]) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, layers.map((layer) => h("tr", { class: layer.layer === first ? "first" : null },
      h("th", { scope: "row" }, layer.layer === first ? `${layer.layer} (first)` : String(layer.layer)),
      kinds.map(([name], i) => bar(layer[name], largest[i], i)))))));
}

/** Show how many tokens each expert got, as a multiple of an even share, for the steps with a token record. */
function expertLoad() {
  const steps = DATA.steps.filter((step) => step.load.length);
  if (!steps.length) return h("p", { class: "note" }, "No token records with routes in this page, so no load by expert.");
  const place = h("div", {});
  const show = (i) => place.replaceChildren(loadMap(steps[i]));
  const choice = select("Step:", steps.map((step, i) => [i, String(step.step)]), show);
  choice.box.value = String(steps.length - 1);
  show(steps.length - 1);
  return h("div", { class: "block" }, h("h3", {}, "Experts"), choice.element, place);
}

function loadMap(step) {
  const totals = step.load.map((line) => line.reduce((sum, count) => sum + count, 0));
  return heatmap({
    title: "load of each expert in the engine, 1 is an even share", fromZero: true,
    rows: step.layers.map(String), columns: step.load[0].map((_, i) => String(i)), rowName: "layer", columnName: "expert",
    value: (row, column) => (totals[row] ? (step.load[row][column] * step.num_experts) / totals[row] : null),
  });
}
