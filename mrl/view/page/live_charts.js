// The curves of a live page: rows are added to them, and the charts in view are drawn again.

const ROWS_TO_RELOAD = 1500;

/** The figures of charts that are in view, and of those that lack the newest rows. */
const inView = new Set();
const stale = new Set();
let isDrawing = false;
let rowsAdded = 0;

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) inView.add(target);
    else inView.delete(target);
  }
  drawStale();
}, { rootMargin: "200px" });

onChart = (figure) => watcher.observe(figure);

function forgetChart(figure) {
  watcher.unobserve(figure);
  inView.delete(figure);
  stale.delete(figure);
  CHARTS.get(figure)?.forget();
  figure.remove();
}

/** Redraw all charts: those in view with the next frame, and others when they come into view. */
function curvesHaveChanged() {
  for (const figure of CHARTS.keys()) stale.add(figure);
  drawStale();
}

function drawStale() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const figure of [...stale]) {
      if (!inView.has(figure) || !figure.isConnected) continue;
      stale.delete(figure);
      CHARTS.get(figure)?.draw();
    }
  });
}

/** Return the series of a key; it is made if there is none. A key may have any name, such as `__proto__`. */
function ownSeries(key) {
  if (!Object.hasOwn(SERIES, key)) Object.defineProperty(SERIES, key, { value: { v: [], steps: [] }, enumerable: true, configurable: true, writable: true });
  return SERIES[key];
}

function setUnits(units) {
  for (const [key, unit] of Object.entries(units)) Object.defineProperty(DATA.metrics.units, key, { value: unit, enumerable: true, configurable: true, writable: true });
}

/** Give every series steps of its own, to which rows can be added. */
function separateSteps() {
  for (const series of Object.values(SERIES)) {
    series.steps = [...stepsOf(series)];
    delete series.at;
  }
}

/** Replace all curves. A series stays the same object, because charts hold it. */
function replaceCurves(metrics) {
  STEPS.length = 0;
  for (const step of metrics.steps) STEPS.push(step);
  for (const key of Object.keys(SERIES)) {
    if (!Object.hasOwn(metrics.series, key)) {
      Object.assign(SERIES[key], { v: [], steps: [] });
      delete SERIES[key];
    }
  }
  for (const [key, given] of Object.entries(metrics.series)) {
    const steps = given.at ? given.at.map((i) => metrics.steps[i]) : [...metrics.steps];
    Object.assign(ownSeries(key), { v: given.v, steps });
  }
  setUnits(metrics.units);
  rowsAdded = 0;
}

/** Add a row to the curves. Return whether the page should ask for all curves again, because these have become long. */
function addRow({ step, values, units }) {
  insert(STEPS, step);
  for (const [key, value] of Object.entries(values)) {
    const series = ownSeries(key);
    const { place, isNew } = insert(series.steps, step);
    series.v.splice(place, isNew ? 0 : 1, value);
  }
  setUnits(units);
  rowsAdded += 1;
  return rowsAdded >= ROWS_TO_RELOAD;
}

/** Put a step into an ascending list, unless it is there. */
function insert(steps, step) {
  if (!steps.length || step > steps[steps.length - 1]) {
    steps.push(step);
    return { place: steps.length - 1, isNew: true };
  }
  let place = nearest(steps, step);
  if (steps[place] === step) return { place, isNew: false };
  if (steps[place] < step) place += 1;
  steps.splice(place, 0, step);
  return { place, isNew: true };
}

/** Make a grid of charts that follows the keys there are. `find` returns {charts: the specs, note}. */
function liveGrid(find, none = "") {
  const grid = h("div", { class: "grid" });
  const note = h("p", { class: "note" });
  const figures = new Map();

  function arrange() {
    const found = find();
    const wanted = new Map(found.charts.map((spec) => [JSON.stringify([spec.title, spec.keys, spec.rest, spec.labels]), spec]));
    for (const [name, figure] of [...figures]) {
      if (wanted.has(name)) continue;
      figures.delete(name);
      forgetChart(figure);
    }
    let place = grid.firstChild;
    for (const [name, spec] of wanted) {
      const figure = figures.get(name) || chart(spec);
      figures.set(name, figure);
      if (figure === place) place = place.nextSibling;
      else grid.insertBefore(figure, place);
    }
    note.textContent = wanted.size ? found.note : none;
  }

  arrange();
  return { element: h("div", {}, grid, note), arrange };
}

/** All metrics, rebuilt when there are new keys, with what was open and searched for. */
function liveMetrics() {
  const element = h("div", {}, allMetrics());
  let known = Object.keys(SERIES).length;

  function arrange() {
    if (Object.keys(SERIES).length === known) return;
    known = Object.keys(SERIES).length;
    const open = [...element.querySelectorAll("details[open] > summary")].map((summary) => nameOfFold(summary));
    const box = element.querySelector("#search");
    const [text, hasFocus] = [box.value, document.activeElement === box];
    element.replaceChildren(allMetrics());
    for (const summary of element.querySelectorAll("summary")) if (open.includes(nameOfFold(summary))) summary.parentElement.open = true;
    const now = element.querySelector("#search");
    now.value = text;
    if (text) now.dispatchEvent(new Event("input"));
    if (hasFocus) now.focus();
  }

  return { element, arrange };
}

function nameOfFold(summary) {
  return summary.textContent.replace(/ \(\d+\)$/, "");
}
