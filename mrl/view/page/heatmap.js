// Heatmaps: a grid of cells on a canvas. The cell under the pointer, or chosen by arrow keys, is described below it.

const PALETTE = {
  light: [[244, 246, 249], [171, 205, 231], [66, 133, 191], [20, 54, 112]],
  dark: [[30, 38, 48], [33, 84, 130], [70, 152, 212], [214, 236, 252]],
};

/**
 * Make a figure with a heatmap. Fields of `spec`: title, rows and columns (their labels), rowName, columnName,
 * value(row, column) -> number or null, remark(row, column) -> a string to show after the value,
 * onPick(row, column), fromZero (whether the colour scale begins at 0).
 */
function heatmap(spec) {
  const canvas = h("canvas", { tabindex: "0", role: "img" });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const legend = h("canvas", { class: "ramp", width: 120, height: 10, "aria-hidden": "true" });
  const range = rangeOf(spec);
  const picked = { row: -1, column: -1 };
  const figure = h("figure", { class: "heatmap" }, h("figcaption", {}, h("span", { class: "chart-title" }, spec.title)), canvas,
    h("div", { class: "heat-foot" }, h("span", { class: "scale" }, number(range.low), " ", legend, " ", number(range.high)), readout));
  const place = {};

  function draw() {
    const width = Math.max(200, figure.clientWidth - 2);
    Object.assign(place, layout(spec, width));
    paint(canvas, spec, range, place, picked);
    ramp(legend);
  }

  function pick(row, column) {
    Object.assign(picked, { row, column });
    const there = row >= 0 && column >= 0;
    const value = there ? spec.value(row, column) : null;
    readout.textContent = there ? `${spec.rowName} ${spec.rows[row]}, ${spec.columnName} ${spec.columns[column]}: ${value === null ? "none" : number(value)}${spec.remark ? spec.remark(row, column) : ""}` : "";
    draw();
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - place.top) / place.cellHeight);
    const column = Math.floor((event.clientX - box.left - place.left) / place.cellWidth);
    const inside = row >= 0 && row < spec.rows.length && column >= 0 && column < spec.columns.length;
    return inside ? [row, column] : [-1, -1];
  }

  canvas.addEventListener("pointermove", (event) => pick(...cellAt(event)));
  canvas.addEventListener("pointerleave", () => pick(-1, -1));
  canvas.addEventListener("click", (event) => {
    const [row, column] = cellAt(event);
    if (row >= 0 && spec.onPick) spec.onPick(row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" && picked.row >= 0 && spec.onPick) spec.onPick(picked.row, picked.column);
    if (!by) return;
    event.preventDefault();
    const inside = (at, count) => Math.min(count - 1, Math.max(0, at));
    pick(inside(Math.max(0, picked.row) + (picked.row < 0 ? 0 : by[0]), spec.rows.length), inside(Math.max(0, picked.column) + (picked.column < 0 ? 0 : by[1]), spec.columns.length));
  });
  canvas.setAttribute("aria-label", `${spec.title}: ${spec.rows.length} rows (${spec.rowName}), ${spec.columns.length} columns (${spec.columnName}), values from ${number(range.low)} to ${number(range.high)}. Arrow keys read single cells.`);
  whenSized(figure, draw);
  return figure;
}

function rangeOf(spec) {
  let [low, high] = [Infinity, -Infinity];
  spec.rows.forEach((_, row) => spec.columns.forEach((__, column) => {
    const value = spec.value(row, column);
    if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }));
  if (low > high) return { low: 0, high: 0 };
  return { low: spec.fromZero ? Math.min(0, low) : low, high };
}

function layout(spec, width) {
  const left = 34;
  const top = 4;
  const cellWidth = Math.min(48, (width - left - 4) / spec.columns.length);
  const cellHeight = Math.max(5, Math.min(18, 420 / spec.rows.length));
  return { width, left, top, cellWidth, cellHeight, height: top + cellHeight * spec.rows.length + 18 };
}

function paint(canvas, spec, range, place, picked) {
  const { width, height, left, top, cellWidth, cellHeight } = place;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const ink = getComputedStyle(canvas).color;
  pen.scale(ratio, ratio);
  spec.rows.forEach((_, row) => spec.columns.forEach((__, column) => {
    const value = spec.value(row, column);
    if (value === null) return;
    pen.fillStyle = colour(range.high > range.low ? (value - range.low) / (range.high - range.low) : 0);
    const gap = cellWidth > 6 ? 1 : 0;
    pen.fillRect(left + column * cellWidth, top + row * cellHeight, Math.max(1, cellWidth - gap), cellHeight - (cellHeight > 6 ? 1 : 0));
  }));
  pen.fillStyle = ink;
  pen.strokeStyle = ink;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const everyRow = Math.ceil(12 / cellHeight);
  spec.rows.forEach((label, row) => row % everyRow === 0 && pen.fillText(label, left - 6, top + (row + 0.5) * cellHeight));
  pen.textAlign = "center";
  const everyColumn = Math.ceil(46 / cellWidth);
  spec.columns.forEach((label, column) => column % everyColumn === 0 && pen.fillText(label, left + (column + 0.5) * cellWidth, height - 8));
  if (picked.row >= 0) {
    pen.lineWidth = 2;
    pen.strokeRect(left + picked.column * cellWidth, top + picked.row * cellHeight, cellWidth, cellHeight);
  }
}

function ramp(canvas) {
  const pen = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    pen.fillStyle = colour(x / (canvas.width - 1));
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

function colour(share) {
  const stops = PALETTE[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"];
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1);
  const [from, to] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
  return `rgb(${from.map((v, i) => Math.round(v + (to[i] - v) * (at % 1))).join(",")})`;
}
