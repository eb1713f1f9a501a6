// The timeline: what the trainer and each engine did when, in one lane each, and charts of waiting, queue and staleness.

const WAITING = [
  { title: "Idle share of each role", match: ["async/rollout_idle_share", "async/trainer_idle_share"] },
  { title: "What the engines did, seconds", match: [/^time\/engine_.*_s$/], stacked: true },
  { title: "Groups in flight", match: ["async/queued_groups", "async/leased_groups", "async/waiting_prompts"] },
  { title: "Age of the queue and of the engines", match: ["async/queue_age", "async/engine_lag", "async/versions_in_flight"] },
  { title: "Staleness of each step's groups", match: [/^async\/staleness\//], stacked: true },
  { title: "Dropped prompts, since the start", match: [/^async\/dropped\//] },
  { title: "Duplicates and lost workers, since the start", match: ["async/duplicates", "async/lost_workers"] },
];
const LANE = { height: 24, gap: 8, left: 78, right: 10, top: 22, bottom: 24 };

function timelineSection() {
  const data = DATA.timeline;
  const drawn = data.why ? h("p", { class: "note" }, data.why) : lanesFigure(data);
  return h("div", {}, drawn, keysLike(/^async\//).length ? chartGrid(WAITING) : null, stalenessBars(data.staleness));
}

/** Make a figure with a lane for the trainer and for each engine. The pointer and the arrow keys choose a span to describe. */
function lanesFigure(data) {
  const plot = h("div", { class: "plot lanes", tabindex: "0", role: "group", onkeydown: moveSpan,
    "aria-label": "Timeline of trainer and engines. Left and right read the spans of a lane, up and down change the lane." });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const picked = { lane: 0, span: -1 };
  const first = data.steps[0][0];
  const last = data.steps[data.steps.length - 1][0];
  const figure = h("figure", { class: "chart timeline" },
    h("figcaption", {}, h("span", { class: "chart-title" }, `Trainer and engines, ${first === last ? `step ${first}` : `steps ${first} to ${last}`}`)),
    plot, readout, data.lanes.map(laneLegend), data.note ? h("p", { class: "note" }, data.note) : null);

  function pick(lane, span) {
    Object.assign(picked, { lane, span });
    const [begin, end, kind] = data.lanes[lane].spans[span];
    const step = stepAt(data.steps, begin);
    readout.textContent = `${data.lanes[lane].name}, step ${step}: ${data.lanes[lane].kinds[kind].text}, ${number(Number((end - begin).toFixed(3)))} s from ${number(Number(begin.toFixed(2)))} s`;
    for (const box of plot.querySelectorAll(".span")) box.classList.toggle("picked", box.dataset.at === `${lane} ${span}`);
    if (STEPS.includes(step)) cursor.set(step);
  }

  function moveSpan(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    const inside = (at, count) => Math.min(count - 1, Math.max(0, at));
    const lane = inside(picked.lane + by[0], data.lanes.length);
    const spans = data.lanes[lane].spans;
    if (!spans.length) return;
    if (lane === picked.lane) pick(lane, inside(picked.span + by[1], spans.length));
    else pick(lane, inside(spans.findIndex((span) => span[1] > (data.lanes[picked.lane].spans[picked.span] || [0])[0]), spans.length));
  }

  plot.addEventListener("pointermove", (event) => {
    if (event.target.dataset && event.target.dataset.at) pick(...event.target.dataset.at.split(" ").map(Number));
  });
  whenSized(plot, () => {
    plot.replaceChildren(drawLanes(data, Math.max(240, plot.clientWidth)));
    if (picked.span >= 0) pick(picked.lane, picked.span);
  });
  return figure;
}

/** Return the step that was running at the time `at`, which is the last step that had begun. */
function stepAt(steps, at) {
  let found = steps[0][0];
  for (const [step, begin] of steps) if (begin <= at) found = step;
  return found;
}

function drawLanes(data, width) {
  const spans = data.lanes.flatMap((lane) => lane.spans);
  let [first, last] = [0, 0];
  for (const [begin, end] of spans) [first, last] = [Math.min(first, begin), Math.max(last, end)];
  const inner = width - LANE.left - LANE.right;
  const x = (at) => LANE.left + (last > first ? ((at - first) / (last - first)) * inner : 0);
  const top = (lane) => LANE.top + lane * (LANE.height + LANE.gap);
  const height = top(data.lanes.length) + LANE.bottom;
  let free = -Infinity;
  const marks = data.steps.flatMap(([step, begin]) => {
    const line = svg("line", { class: "gridline", x1: x(begin), x2: x(begin), y1: LANE.top - 6, y2: top(data.lanes.length) });
    if (x(begin) < free) return [line];
    free = x(begin) + 8 * String(step).length + 10;
    return [line, svg("text", { class: "mark", x: x(begin), y: 12, "text-anchor": "middle" }, String(step))];
  });
  return svg("svg", { width, height }, marks,
    svg("text", { class: "mark axis", x: 2, y: 12 }, "step"),
    svg("text", { class: "mark axis", x: width - LANE.right, y: height - 2, "text-anchor": "end" }, "seconds"),
    ticks(0, last, width / 110).map((at) => svg("text", { class: "mark", x: x(at), y: top(data.lanes.length) + 9, "text-anchor": "middle" }, number(at))),
    data.lanes.flatMap((lane, i) => [
      svg("text", { class: "mark", x: LANE.left - 8, y: top(i) + LANE.height / 2 + 4, "text-anchor": "end" }, lane.name),
      ...lane.spans.map(([begin, end, kind], j) => svg("rect", { class: `span area c${lane.kinds[kind].colour % 8}`, "data-at": `${i} ${j}`,
        x: x(begin), y: top(i), width: Math.max(0.6, x(end) - x(begin)), height: LANE.height }))]));
}

/** List the activities of a lane, each with its share of the lane's time. */
function laneLegend(lane) {
  return h("ul", { class: "legend" }, h("li", {}, h("strong", {}, lane.name)), lane.kinds.map((kind) =>
    h("li", {}, h("span", { class: `swatch c${kind.colour % 8}`, "aria-hidden": "true" }),
      h("span", { class: "key" }, kind.text), " ", h("span", { class: "value" }, percent(kind.share)))));
}

function percent(share) {
  return `${Number((100 * share).toPrecision(share < 0.1 ? 1 : 3))}%`;
}

/** Make a histogram of the groups of all steps by their staleness. */
function stalenessBars(counts) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!total) return null;
  const most = Math.max(...counts.map(([, count]) => count));
  const bar = (count) => {
    const inner = h("span", { class: "bar c0" });
    inner.style.width = `${(100 * count) / most}%`;
    return h("td", { class: "bar-cell" }, h("span", { class: "bar-room" }, inner), h("span", { class: "bar-number" }, number(count)));
  };
  return h("div", { class: "block scroll", id: "staleness" }, h("table", { class: "bars" },
    h("caption", {}, `Staleness of ${number(total)} groups, all steps`),
    h("thead", {}, h("tr", {}, ["versions", "groups", "share"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, counts.map(([age, count]) => h("tr", {}, h("th", { scope: "row" }, String(age)), bar(count), h("td", {}, percent(count / total)))))));
}
