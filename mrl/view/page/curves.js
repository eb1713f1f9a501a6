// The curves of a run: first the most important ones, then every metric under "All metrics".

const MAX_FOUND = 60;
const MAX_KEYS = 8; // the largest number of curves of a chart, which is the number of colours

/** Specs of the charts that are shown first. `by` maps a key to the name of its chart, if a spec makes several charts. */
const USUAL = [
  { title: "Reward", match: ["reward/mean"], spread: { key: "reward/mean", by: "reward/std" }, note: "band: one standard deviation" },
  { title: "Response length", match: ["response_len/mean", "response_len/max"] },
  { title: "Truncated share of the responses", match: ["response_len/truncated"] },
  { title: "Reward of each source", match: [/^source\/.*\/reward_mean$/] },
  { title: "Response length of each source", match: [/^source\/.*\/response_len$/] },
  { title: "Truncated share of each source", match: [/^source\/.*\/truncated$/] },
  { title: "Zero-variance share of each source", match: [/^source\/.*\/zero_variance_share$/] },
  { title: "Loss", match: [/^loss\//] },
  { title: "Gradient norm", match: ["grad_norm"] },
  { title: "Ratio", match: ["ratio/mean", "ratio/max"] },
  { title: "Clipped share", match: [/^ratio\/.*clip/] },
  { title: "Entropy", match: ["entropy"] },
  { title: "KL to the reference", match: [/^kl(\/|$)/, /^ref\/kl/] },
  { title: "Importance weights", match: [/^importance\//] },
  { title: "Critic", match: [/^value\/(?!lr$)/] },
  { title: "Evaluation", match: [/^eval\/[^/]+\/(avg|pass)@/], by: (key) => key.split("/")[1] },
  { title: "Evaluation, response length", match: [/^eval\/[^/]+\/response_len$/] },
  { title: "Evaluation, truncated share", match: [/^eval\/[^/]+\/truncated$/] },
  { title: "Evaluation, unscored samples", match: [/^eval\/[^/]+\/unscored$/] },
  { title: "Seconds a step", match: [/^time\/(?!step_s|recovery_s|verify_s|batch_wait_s|engine_).*_s$/], stacked: true },
  { title: "Step time", match: ["time/step_s"] },
  { title: "Tokens per second", match: [/^throughput\/.*_tokens_per_s$/] },
  { title: "Tokens per second and GPU", match: [/^throughput\/.*_tokens_per_gpu_s$/] },
  { title: "MFU of the training pass", match: ["throughput/mfu"] },
  { title: "Memory", match: [/^memory\/.*_bytes$/], format: bytes, by: (key) => key.split("/").slice(1, -1).join("/") },
  { title: "Learning rate", match: ["lr"] },
  { title: "Zero-variance groups", match: ["reward/zero_signal_groups"] },
  { title: "Samples without a reward", match: ["reward/abstained"] },
  { title: "Guards", match: [/^guard\//] },
];

/** Specs of the charts that compare engine and trainer. */
const MISMATCH = [
  { title: "KL of engine and trainer", match: ["mismatch/k1", "mismatch/k3", "mismatch/chi2"] },
  { title: "|\u0394 log-prob|, percentiles", log: true,
    match: ["mismatch/p50", "mismatch/p90", "mismatch/p99", "mismatch/p999", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"] },
  { title: "Extreme ratios, share of tokens", match: ["mismatch/extreme_share"] },
  { title: "Routes that differ", match: ["routing/disagreement", "routing/token_any_layer"] },
  { title: "Router margins", match: [/^routing\/margin_(median_)?at_(dis)?agreement$/] },
  { title: "Mean |\u0394 log-prob| by what is replayed", match: [/^decompose\/.*\/logprob_abs_mean$/] },
  { title: "Replay coverage", match: ["routing/replay_coverage"] },
  { title: "Staleness, versions", match: ["staleness/mean", "staleness/max"] },
  { title: "Expert load", match: ["moe/load_max", "moe/dead_experts"] },
];

function usualCurves() {
  return chartGrid(USUAL);
}

/** Make the charts of the specs. */
function chartGrid(specs) {
  const { charts, note } = gridSpecs(specs);
  return h("div", {}, h("div", { class: "grid" }, charts.map(chart)), note ? h("p", { class: "note" }, note) : null);
}

/**
 * Return the spec of each chart, and a note about what has none. If a spec has more than three keys, keys whose values are all 0
 * are left out.
 */
function gridSpecs(specs) {
  const zeros = [];
  const charts = specs.flatMap((spec) => {
    const keys = keysLike(...spec.match);
    const telling = keys.length > 3 ? keys.filter((key) => SERIES[key].v.some((v) => v !== 0)) : keys;
    zeros.push(...keys.filter((key) => !telling.includes(key)));
    return split(spec, telling);
  });
  return { charts, note: zeros.length ? `Not drawn here, as they are 0 at every ${STEP}: ${zeros.length} of the keys under All metrics.` : "" };
}

/** Split a spec into specs with at most MAX_KEYS curves each. A stacked chart is not split; its smallest curves are summed. */
function split(spec, keys) {
  if (spec.stacked && keys.length > MAX_KEYS) {
    const total = (key) => SERIES[key].v.reduce((sum, v) => sum + v, 0);
    const rest = [...keys].sort((a, b) => total(b) - total(a)).slice(MAX_KEYS - 1);
    return [{ ...spec, keys: keys.filter((key) => !rest.includes(key)), rest }];
  }
  const groups = new Map();
  for (const key of keys) {
    const name = spec.by ? spec.by(key) : "";
    groups.set(name, [...(groups.get(name) || []), key]);
  }
  return [...groups].flatMap(([name, members]) => {
    const title = name ? `${spec.title}: ${name}` : spec.title;
    const count = Math.ceil(members.length / MAX_KEYS);
    return Array.from({ length: count }, (_, i) => ({
      ...spec, title: count > 1 ? `${title} (${i + 1} of ${count})` : title, keys: members.slice(i * MAX_KEYS, (i + 1) * MAX_KEYS) }));
  });
}

function formatOf(key) {
  return key.endsWith("_bytes") ? bytes : number;
}

/** Make a fold for each first part of the keys (up to a slash). A chart is drawn when its fold opens or a search finds it. */
function allMetrics() {
  const keys = Object.keys(SERIES);
  const groups = new Map();
  for (const key of keys) {
    const name = key.includes("/") ? key.slice(0, key.indexOf("/")) : "general";
    groups.set(name, [...(groups.get(name) || []), key]);
  }
  const found = h("div", { class: "grid", id: "found" });
  const count = h("p", { class: "note", "aria-live": "polite" });
  const folds = h("div", { class: "folds" }, [...groups].map(([name, members]) => fold(name, members)));
  const box = h("input", { type: "search", id: "search", placeholder: "e.g. layer_02 or clip", autocomplete: "off", spellcheck: "false",
    oninput: () => search(box.value.trim().toLowerCase()) });

  function search(text) {
    const words = text.split(/\s+/).filter(Boolean);
    const hits = words.length ? keys.filter((key) => words.every((word) => key.toLowerCase().includes(word))) : [];
    found.replaceChildren(...hits.slice(0, MAX_FOUND).map(single));
    const more = hits.length > MAX_FOUND ? `, the first ${MAX_FOUND} are drawn` : "";
    count.textContent = words.length ? `${hits.length} of ${keys.length} keys${more}` : `${keys.length} keys`;
    folds.hidden = words.length > 0;
  }

  search("");
  return h("div", {}, h("p", {}, h("label", { class: "choice" }, "Search keys ", box)), count, found, folds);
}

const singles = new Map();

function single(key) {
  if (!singles.has(key)) singles.set(key, chart({ title: key, keys: [key], labels: ["value"], format: formatOf(key) }));
  return singles.get(key);
}

function fold(name, members) {
  const grid = h("div", { class: "grid" });
  const element = h("details", { ontoggle: () => element.open && grid.replaceChildren(...members.map(single)) },
    h("summary", {}, `${name} (${members.length})`), grid);
  return element;
}
