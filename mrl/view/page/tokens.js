// The tokens of a sample: their unpacked data, their colours and their text.

const EXTREME = Math.LN2;

/** Undo the packing of mrl/view/samples.py. The result is kept, so each sample is unpacked once. */
function unpack(sample, step) {
  if (sample.unpacked) return sample.unpacked;
  const repeated = (runs) => runs.flatMap(([value, count]) => new Array(count).fill(value));
  const routes = sample.routes === undefined ? null : {
    captured: readIds(sample.routes, step.num_experts),
    native: readIds(sample.native, step.num_experts),
    differ: new Map(sample.differ_at.map((place, i) => [place, i])),
    margins: sample.margins,
  };
  const differing = sample.tokens.map(() => 0);
  if (routes) for (const place of routes.differ.keys()) differing[Math.floor(place / step.layers.length)] += 1;
  sample.unpacked = { mask: repeated(sample.mask), versions: repeated(sample.versions), advantage: repeated(sample.advantage), routes, differing };
  return sample.unpacked;
}

function readIds(text, numExperts) {
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return numExperts <= 0xff ? raw : new Uint16Array(raw.buffer);
}

/** Return `count` expert ids from `start` on; null if there was no route. */
function idsAt(ids, start, count) {
  const found = Array.from(ids.subarray(start, start + count));
  return found.includes(ids.BYTES_PER_ELEMENT === 1 ? 0xff : 0xffff) ? null : found;
}

/** Return the routes of a token, [{layer, captured, native, margin, differs}, ...]; null if the sample has no routes. */
function routesOf(sample, step, token) {
  const { routes } = unpack(sample, step);
  if (!routes) return null;
  return step.layers.map((layer, l) => {
    const place = token * step.layers.length + l;
    const i = routes.differ.get(place);
    const captured = idsAt(routes.captured, place * step.topk, step.topk);
    if (i === undefined) return { layer, captured, native: null, margin: null, differs: false };
    return { layer, captured, native: idsAt(routes.native, i * step.topk, step.topk), margin: routes.margins[i] ?? null, differs: true };
  });
}

const COLOURINGS = [
  ["d", "\u0394 log-prob (full at ratio 2)"],
  ["relative", "\u0394 log-prob (relative to this sample)"],
  ["routes", "layers routed differently"],
  ["entropy", "entropy"],
  ["advantage", "advantage"],
];

/** Return a number in [-1, 1] for the colour of each token; null for a token without colour. */
function shades(kind, sample, step) {
  const { mask, differing, advantage } = unpack(sample, step);
  const off = (values) => values.map((value, i) => (mask[i] && value !== null ? value : null));
  const scaled = (values) => {
    const largest = values.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 1e-30);
    return values.map((value) => (value === null ? null : value / largest));
  };
  if (kind === "d") return off(sample.d).map((d) => (d === null ? null : Math.max(-1, Math.min(1, d / EXTREME))));
  if (kind === "relative") return scaled(off(sample.d));
  if (kind === "routes") return differing.map((count) => (count ? count / step.layers.length : null));
  if (kind === "entropy") return scaled(off(sample.entropy));
  return scaled(off(advantage));
}

function legendOf(kind) {
  const signed = kind !== "routes" && kind !== "entropy";
  const names = { d: ["engine more likely", "trainer more likely"], relative: ["engine more likely", "trainer more likely"],
    advantage: ["negative", "positive"], routes: ["", "all layers"], entropy: ["", "highest here"] }[kind];
  const box = (share) => {
    const element = h("span", { class: "token-swatch" });
    element.style.backgroundColor = tint(share);
    return element;
  };
  return h("span", { class: "legend-line" }, signed ? [box(-1), ` ${names[0]} `] : null, box(1), ` ${names[1]}`,
    h("span", { class: "extreme sample-mark" }, "underlined"), " ratio outside [\u00bd, 2] ", h("span", { class: "rerouted sample-mark" }, "dotted"), " routed differently");
}

function tint(share) {
  const [r, g, b] = share < 0 ? [224, 112, 16] : [44, 123, 214];
  return `rgba(${r},${g},${b},${(0.6 * Math.sqrt(Math.abs(share))).toFixed(3)})`;
}

/** Show everything that is known about a token: a list of its values and a table of its routes. */
function tokenPanel(sample, step, token) {
  const { mask, versions, advantage } = unpack(sample, step);
  const learned = mask[token];
  const [rollout, d] = [sample.rollout[token], sample.d[token]];
  const of = (value) => (learned ? number(value) : "\u2013");
  const version = versions[token];
  const facts = [
    ["token", h("code", { class: "piece" }, JSON.stringify(step.pieces[sample.tokens[token]] ?? null))],
    ["token id", String(sample.tokens[token])],
    ["position", `${token} of ${sample.num_tokens}`],
    ["rollout log-prob", of(rollout)],
    ["old log-prob", of(rollout === null || d === null ? null : rollout + d)],
    ["difference \u0394", of(d)],
    ["ratio exp(\u0394)", of(d === null ? null : Math.exp(d))],
    sample.ref ? ["reference log-prob", of(sample.ref[token])] : null,
    ["advantage", of(advantage[token])],
    ["entropy", of(sample.entropy[token])],
    ["weight version", version < 0 ? "not chosen by the policy" : `${version}${version === step.version ? "" : `, trainer's is ${step.version}`}`],
    ["in the loss", learned ? "yes" : "no"],
  ].filter(Boolean);
  return h("div", {}, h("dl", { class: "token-facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), routeTable(sample, step, token));
}

function routeTable(sample, step, token) {
  const rows = routesOf(sample, step, token);
  if (!rows) return h("p", { class: "note" }, sample.routes_left_out ? "Routes of this sample are left out: the page would be too large." : "No routes were captured.");
  if (rows.every((row) => row.captured === null)) return h("p", { class: "note" }, "No route was captured for this token: the trainer's router chose.");
  const list = (ids) => (ids === null ? "\u2013" : ids.join(" "));
  return h("div", { class: "scroll tall" }, h("table", { class: "routes" },
    h("caption", {}, `Experts of this token as an input, ${rows.filter((row) => row.differs).length} of ${rows.length} layers differ`),
    h("thead", {}, h("tr", {}, ["layer", "captured", "trainer's own", "margin"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", { class: row.differs ? "differs" : null },
      h("th", { scope: "row" }, `${row.layer}${row.differs ? " \u2260" : ""}`), h("td", {}, list(row.captured)), h("td", {}, row.differs ? list(row.native) : row.captured ? "same" : list(null)), h("td", {}, row.differs ? number(row.margin) : ""))))));
}
