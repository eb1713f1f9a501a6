// What all scripts of a page use: the data, functions that make elements and format numbers, and the cursor.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STEPS = DATA.metrics.steps;
const SERIES = DATA.metrics.series;
const STEP = DATA.metrics.step; // what the numbers of STEPS count: step, or round

/** Make an HTML element. Children are elements or strings; a string never becomes markup. `on*` attributes are listeners. */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element, like `h`. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Format a number with up to four significant digits; null becomes an en dash. */
function number(value) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  if (value === null || value === undefined) return "\u2013";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, Math.abs(value))) / 3)));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

/** Return the metric keys that match any of the patterns, in the order of the patterns. */
function keysLike(...patterns) {
  const keys = Object.keys(SERIES);
  return [...new Set(patterns.flatMap((pattern) =>
    pattern instanceof RegExp ? keys.filter((key) => pattern.test(key)) : keys.filter((key) => key === pattern)))];
}

/** Return the step number of each value of a curve. */
function stepsOf(series) {
  if (!series.steps) series.steps = series.at ? series.at.map((i) => STEPS[i]) : STEPS;
  return series.steps;
}

/** Return the index of the entry of `sorted` that is nearest to `value`; -1 for an empty list. */
function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}

/** Return about `count` round numbers from `low` to `high`, for the marks of an axis; only integers if `whole`. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let gap = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  if (whole) gap = Math.max(1, Math.round(gap));
  const found = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i += 1) found.push(Number((i * gap).toPrecision(12)));
  return found;
}

/** The step that all charts point at; null if there is none. Listeners are called with the new step. */
const cursor = {
  step: null,
  listeners: new Set(),
  set(step) {
    if (step === this.step) return;
    this.step = step;
    for (const listener of this.listeners) listener(step);
  },
};

/** Call `draw` when the width of the element changes, or when the colour scheme changes. */
function whenSized(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth > 0 && element.clientWidth !== width) {
      width = element.clientWidth;
      draw();
    }
  }).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => width > 0 && draw());
}

function select(label, options, onChange) {
  const box = h("select", { onchange: () => onChange(box.value) },
    options.map(([value, text]) => h("option", { value }, text)));
  return { element: h("label", { class: "choice" }, `${label} `, box), box };
}

/** Make a token's text visible: line breaks and tabs get a mark, and other control characters become their code point. */
function visible(piece) {
  if (piece === undefined) return "\u25a1";
  if (piece === "") return "\u2205";
  return [...piece].map((letter) => {
    if (letter === "\n") return "\u21b5\n";
    if (letter === "\t") return "\u21e5\t";
    const hidden = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u.test(letter);
    return hidden ? `\u27e8${letter.codePointAt(0).toString(16).toUpperCase()}\u27e9` : letter;
  }).join("");
}
