// Charts as SVG: a curve for each metric key, the values at the cursor's step, and a linear or log axis.

const HEIGHT = 171;
const EDGE = { left: 52, right: 10, top: 19, bottom: 30 };
const MAX_DOTS = 40;
let chartNumber = 0;

/** The charts of the page: `draw` redraws a chart from the curves, `forget` is for one that was removed. */
const CHARTS = new Map();
/** Called with each new chart. */
let onChart = () => {};

/**
 * Make a figure with curves. Fields of `spec`: title, keys, labels (one per key), colours (one number per
 * key, if a colour has the same meaning in several charts, which then name curves by their labels), label (function
 * from a key to its label), log (whether the axis is log at first), stacked (draw areas on top of each other), rest (keys
 * that are drawn as one curve, their sum), height (pixels), format (function from a value to a string), note, spread ({key, by}: a
 * band of the value of `key` plus and minus the value of `by`).
 */
function chart(spec) {
  const parts = partsOf(spec);
  const state = { log: Boolean(spec.log) && !spec.stacked, x: null };
  const title = h("span", { class: "chart-title", id: `chart-${(chartNumber += 1)}` }, spec.title);
  const at = h("span", { class: "chart-step" });
  const button = h("button", { type: "button", class: "small", "aria-pressed": String(state.log),
    "aria-label": `Log scale of ${spec.title}`, onclick: () => setLog(!state.log) }, "log");
  const plot = h("div", { class: "plot" });
  const values = parts.map(() => h("span", { class: "value" }));
  const legend = h("ul", { class: "legend" }, parts.map(({ key, label, colour }, i) =>
    h("li", {}, h("span", { class: `swatch c${colour}`, "aria-hidden": "true" }),
      h("span", { class: "key", title: key }, label), " ", values[i])), spec.note ? h("li", { class: "key" }, spec.note) : null);
  const figure = h("figure", { class: "chart", tabindex: "0", "aria-labelledby": title.id, "data-keys": parts.map((part) => part.key).join(" "),
    onkeydown: moveCursor }, h("figcaption", {}, title, at, spec.stacked ? null : button), plot, legend);
  const show = spec.format || number;

  function setLog(on) {
    state.log = on;
    button.setAttribute("aria-pressed", String(on));
    draw();
  }

  function moveCursor(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || event.target !== figure || !STEPS.length) return;
    event.preventDefault();
    const from = cursor.step === null ? (by < 0 ? STEPS.length : -1) : nearest(STEPS, cursor.step);
    cursor.set(STEPS[Math.min(STEPS.length - 1, Math.max(0, from + by))]);
  }

  function readout(step) {
    at.textContent = step === null ? "" : `${STEP} ${step}`;
    parts.forEach(({ series }, i) => {
      const place = step === null ? series.v.length - 1 : nearest(stepsOf(series), step);
      const other = step !== null && stepsOf(series)[place] !== step ? ` (${STEP} ${stepsOf(series)[place]})` : "";
      values[i].textContent = (series.v[place] === null ? "not finite" : show(series.v[place])) + other;
    });
    if (!state.x || !state.line) return;
    state.line.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) state.line.setAttribute(end, state.x(step));
  }

  function draw() {
    if (spec.rest) parts[parts.length - 1].series = restOf(spec);
    const drawn = drawPlot(spec, parts, state.log, Math.max(160, plot.clientWidth), show);
    Object.assign(state, drawn);
    plot.replaceChildren(drawn.element, ...(drawn.note ? [h("p", { class: "note" }, drawn.note)] : []));
    drawn.element.addEventListener("pointermove", (event) => {
      const left = drawn.element.getBoundingClientRect().left;
      cursor.set(STEPS[nearest(STEPS, drawn.stepAt(event.clientX - left))]);
    });
    drawn.element.addEventListener("pointerleave", () => cursor.set(null));
    readout(cursor.step);
  }

  cursor.listeners.add(readout);
  CHARTS.set(figure, { draw, forget: () => { cursor.listeners.delete(readout); CHARTS.delete(figure); } });
  whenSized(plot, draw);
  onChart(figure);
  return figure;
}

/** Return the key, the label, the number of the colour and the series of each curve of a chart. */
function partsOf(spec) {
  const keys = spec.keys.filter((key) => SERIES[key]);
  const short = spec.label ? keys.map(spec.label) : shortLabels(keys);
  const parts = keys.map((key, i) => {
    const place = spec.keys.indexOf(key);
    return { key, label: spec.labels ? spec.labels[place] : short[i], colour: spec.colours ? spec.colours[place] : i % 8, series: SERIES[key] };
  });
  if (!spec.rest) return parts;
  return [...parts, { key: spec.rest.join(" "), label: `${spec.rest.length} others`, colour: parts.length % 8, series: restOf(spec) }];
}

/** Return the sum of the smallest curves of a stacked chart as a series. */
function restOf(spec) {
  const sum = stack(spec.rest.map((key) => curveOf(SERIES[key]))).pop();
  return { v: sum.values, steps: sum.steps };
}

function curveOf(series) {
  return { steps: stepsOf(series), values: series.v };
}

/** Return the unit of a chart's values. If its curves have several units, return all of them. */
function unitOf(parts) {
  const units = parts.flatMap(({ key }) => key.split(" ")).map((key) => DATA.metrics.units[key] || "value");
  return [...new Set(units)].join(", ");
}

/** Return the keys without the leading parts (up to a slash) that all of them have in common. */
function shortLabels(keys) {
  const parts = keys.map((key) => key.split("/"));
  let shared = 0;
  while (keys.length > 1 && parts.every((part) => part.length > shared + 1 && part[shared] === parts[0][shared])) shared += 1;
  return parts.map((part) => part.slice(shared).join("/"));
}

/** Draw the curves. Return the SVG element, its scales, and a note about values that it cannot show. */
function drawPlot(spec, parts, log, width, show) {
  const curvesOf = parts.map(({ series }) => curveOf(series));
  const lines = spec.stacked ? stack(curvesOf) : curvesOf;
  const band = spec.spread && SERIES[spec.spread.key] && SERIES[spec.spread.by] && !log ? bandOf(spec.spread) : null;
  let shown = lines.concat(band ? [band.low, band.high] : []).flatMap((line) => line.values).filter((v) => v !== null);
  const hidden = log ? shown.filter((v) => v <= 0).length : 0;
  if (log) shown = shown.filter((v) => v > 0);
  const height = spec.height || HEIGHT;
  const y = scaleOf(shown, log, spec.stacked, height - EDGE.bottom, EDGE.top);
  const [first, last] = [STEPS[0], STEPS[STEPS.length - 1]];
  const inner = width - EDGE.left - EDGE.right;
  const x = (step) => EDGE.left + (last === first ? inner / 2 : ((step - first) / (last - first)) * inner);
  const stepAt = (at) => (last === first ? first : first + ((at - EDGE.left) / inner) * (last - first));
  const line = svg("line", { class: "cursor", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
  // A curve without any finite value does not apply to this run, such as margins if no route differs.
  const empty = parts.filter((_, i) => curvesOf[i].values.every((v) => v === null));
  const notFinite = [...new Set(lines.flatMap((curve, i) => (empty.includes(parts[i]) ? [] : curve.steps.filter((_, at) => curve.values[at] === null))))];
  const element = svg("svg", { width, height, role: "img", "aria-label": describe(spec, parts, show) },
    axes(x, y, first, last, { width, height }, show, unitOf(parts)),
    band ? svg("path", { class: "band", d: area(band.low, band.high, x, y.at) }) : null,
    spec.stacked ? lines.map((top, i) => svg("path", { class: `area c${parts[i].colour}`, d: area(i ? lines[i - 1] : zero(top), top, x, y.at) })).reverse() : null,
    spec.stacked ? null : lines.map((curve, i) => drawLine(curve, x, y.at, log, `c${parts[i].colour}`)),
    notFinite.map((step) => svg("text", { class: "not-finite", x: x(step), y: EDGE.top + 8, "text-anchor": "middle" }, "\u00d7")),
    line);
  const notes = [empty.length ? `No finite value at any ${STEP}: ${namesOf(spec, empty).join(", ")}.` : "", notFinite.length ? `\u00d7: not finite at ${notFinite.length} ${STEP}(s).` : "", hidden ? `${hidden} value(s) of 0 or less have no place on a log scale.` : ""];
  return { element, x, stepAt, line, note: notes.filter(Boolean).join(" ") };
}

/** Return the labels of curves if `spec` has colours, and otherwise their keys without the parts in common. */
function namesOf(spec, parts) {
  return spec.colours ? parts.map(({ label }) => label) : shortLabels(parts.map(({ key }) => key));
}

function describe(spec, parts, show) {
  const said = parts.map(({ key, label, series }) => {
    const name = spec.colours ? label : key;
    const finite = series.v.filter((v) => v !== null);
    if (!finite.length) return `${name}: no finite value`;
    let [low, high] = [Infinity, -Infinity];
    for (const v of finite) [low, high] = [Math.min(low, v), Math.max(high, v)];
    return `${name}: ${show(low)} to ${show(high)}, last ${show(finite[finite.length - 1])}`;
  });
  return `${spec.title}. ${said.join("; ")}`;
}

/** Return the scale of the vertical axis: `at` maps a value to a pixel, `marks` are the values with a grid line. */
function scaleOf(values, log, fromZero, bottom, top) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of values) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (fromZero) low = Math.min(0, low);
  if (log) {
    const [a, b] = low === high ? [Math.log10(low) - 0.5, Math.log10(high) + 0.5] : [Math.log10(low), Math.log10(high)];
    const powers = ticks(a, b, 4, true).map((power) => 10 ** power);
    const marks = powers.length >= 2 ? powers : [low, high];
    return { at: (v) => bottom - ((Math.log10(v) - a) / (b - a)) * (bottom - top), marks: [...new Set(marks)] };
  }
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 1;
    [low, high] = [low - room, high + room];
  }
  const room = (high - low) * 0.04;
  const [a, b] = [fromZero ? low : low - room, high + room];
  return { at: (v) => bottom - ((v - a) / (b - a)) * (bottom - top), marks: ticks(a, b, 4) };
}

function axes(x, y, first, last, { width, height }, show, unit) {
  const below = height - EDGE.bottom;
  const marks = y.marks.map((value) => [
    svg("line", { class: "gridline", x1: EDGE.left, x2: width - EDGE.right, y1: y.at(value), y2: y.at(value) }),
    svg("text", { class: "mark", x: EDGE.left - 6, y: y.at(value) + 4, "text-anchor": "end" }, show(value))]);
  const steps = first === last ? [first] : ticks(first, last, width / 90, true);
  const names = [svg("text", { class: "mark axis", x: width - EDGE.right, y: height - 2, "text-anchor": "end" }, STEP),
    unit ? svg("text", { class: "mark axis", x: 2, y: 9 }, unit) : null];
  return [marks, names, steps.map((step) =>
    svg("text", { class: "mark", x: x(step), y: below + 15, "text-anchor": x(step) + 3.5 * String(step).length > width ? "end" : "middle" }, String(step)))].flat(2);
}

/** Draw a curve as a path with a gap wherever a value is missing. A point without neighbours gets a dot. */
function drawLine(curve, x, y, log, colour) {
  const points = curve.steps.map((step, i) => [step, curve.values[i]]);
  const fits = ([, v]) => v !== null && (!log || v > 0);
  let path = "";
  const dots = [];
  points.forEach((point, i) => {
    if (!fits(point)) return;
    const joined = i > 0 && fits(points[i - 1]);
    path += `${joined ? "L" : "M"}${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`;
    const alone = !joined && !(i + 1 < points.length && fits(points[i + 1]));
    if (alone || points.length <= MAX_DOTS) dots.push(svg("circle", { class: `dot ${colour}`, cx: x(point[0]), cy: y(point[1]), r: 2.2 }));
  });
  return svg("g", {}, svg("path", { class: `line ${colour}`, d: path }), dots);
}

function area(low, high, x, y) {
  const there = high.steps.map((_, i) => i).filter((i) => high.values[i] !== null && low.values[i] !== null);
  const point = (curve, i) => `${x(curve.steps[i]).toFixed(1)},${y(curve.values[i]).toFixed(1)}`;
  if (!there.length) return "";
  return `M${there.map((i) => point(high, i)).join("L")}L${there.reverse().map((i) => point(low, i)).join("L")}Z`;
}

/** Add each curve to the sum of the curves before it, at the steps of all curves. A missing value counts as 0. */
function stack(curvesOf) {
  const steps = [...new Set(curvesOf.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const sums = steps.map(() => 0);
  return curvesOf.map((curve) => {
    const values = new Map(curve.steps.map((step, i) => [step, curve.values[i]]));
    steps.forEach((step, i) => { sums[i] += values.get(step) ?? 0; });
    return { steps, values: [...sums] };
  });
}

function zero(curve) {
  return { steps: curve.steps, values: curve.steps.map(() => 0) };
}

function bandOf({ key, by }) {
  const steps = stepsOf(SERIES[key]);
  const width = new Map(stepsOf(SERIES[by]).map((step, i) => [step, SERIES[by].v[i]]));
  const side = (sign) => ({ steps, values: steps.map((step, i) => {
    const [middle, half] = [SERIES[key].v[i], width.get(step)];
    return middle === null || half === null || half === undefined ? null : middle + sign * half;
  }) });
  return { low: side(-1), high: side(1) };
}
