// What the run is doing now: the phase of the present step, for how long, and how many samples are finished.

const PHASES = {
  start: ["starts", 7], load: ["loads", 7], sync: ["weight sync", 3], rollout: ["rollout", 0], score: ["scoring", 4], logprobs: ["log-probs", 2],
  train: ["training", 1], save: ["saves", 6], evaluate: ["evaluation", 5], log: ["writes metrics", 7], left: ["has ended", 7], ended: ["has ended", 7],
};
const SECONDS_OF = { sync: "time/sync_s", rollout: "time/rollout_s", score: "time/score_s", logprobs: "time/logprob_s", train: "time/train_s", evaluate: "time/eval_s" };

/** Seconds by which the clock of the server is ahead of the browser's. */
let clockOffset = 0;

function setClock(now) {
  clockOffset = now - Date.now() / 1000;
}

function serverNow() {
  return Date.now() / 1000 + clockOffset;
}

function kindOfPhase(phase) {
  const kind = phase.split(":")[0];
  return Object.hasOwn(PHASES, kind) ? kind : "";
}

function phaseInWords(phase) {
  const kind = kindOfPhase(phase);
  const more = phase.includes(":") ? ` (${phase.slice(phase.indexOf(":") + 1)})` : "";
  return readable(kind ? PHASES[kind][0] + more : phase);
}

function seconds(value) {
  if (value < 0.05) return "0 s";
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

/** Return {element, show(phase, head)}; `tick` brings the seconds up to date. */
function phaseStrip(element) {
  const name = h("strong", {});
  const at = h("span", {});
  const time = h("span", { id: "phase-time" });
  const samples = h("span", { id: "phase-samples" });
  const last = h("span", { class: "note" });
  const fill = h("div", {});
  const progress = h("div", { class: "progress" }, fill);
  const ribbon = h("div", { class: "ribbon", role: "img" });
  const legend = h("ul", { class: "legend" });
  element.append(h("p", { class: "phase-line" }, name, at, time, samples, last), progress, ribbon, legend);
  let now = null;

  function show(phase, head) {
    now = phase;
    element.hidden = !phase || head.word === "failed" || head.word === "gone";
    if (element.hidden) return;
    const kind = kindOfPhase(phase.phase);
    const isOver = head.done !== null && STEP === "step" && phase.step >= 0 && phase.step < head.done && ["sync", "rollout", "score", "evaluate"].includes(kind);
    name.textContent = isOver ? `evaluation of the final weights: ${phaseInWords(phase.phase)}` : phaseInWords(phase.phase);
    const step = phase.step < 0 ? "before the first step" : `${STEP} ${phase.step}${head.planned ? ` (0 to ${head.planned - 1})` : ""}`;
    at.textContent = phase.tenant ? `tenant ${readable(phase.tenant)}, its step ${phase.step}` : step;
    const counts = phase.wanted > 0 && ["rollout", "score", "evaluate"].includes(kind);
    samples.textContent = counts ? `${phase.finished} of ${phase.wanted} samples finished` : "";
    progress.style.visibility = counts ? "visible" : "hidden";
    fill.style.width = counts ? `${Math.min(100, (100 * phase.finished) / phase.wanted)}%` : "0";
    const series = SERIES[SECONDS_OF[kind]];
    const before = series && series.v.length ? series.v[series.v.length - 1] : null;
    last.textContent = before === null || phase.phase.includes(":") ? "" : `in the ${STEP} before: ${seconds(before)}`;
    tick();
  }

  function tick() {
    if (!now || element.hidden) return;
    const end = serverNow();
    time.textContent = `for ${seconds(Math.max(0, end - now.since))}`;
    const spans = now.spans.map(([phase, begin, to]) => [phase, Math.max(0, (to ?? end) - begin)]);
    const sums = new Map();
    for (const [phase, length] of spans) sums.set(kindOfPhase(phase), (sums.get(kindOfPhase(phase)) || 0) + length);
    while (ribbon.children.length > spans.length) ribbon.lastChild.remove();
    while (ribbon.children.length < spans.length) ribbon.append(h("div", {}));
    spans.forEach(([phase, length], i) => {
      const part = ribbon.children[i];
      part.className = `area-back c${PHASES[kindOfPhase(phase)]?.[1] ?? 7}`;
      part.title = `${phaseInWords(phase)}: ${seconds(length)}`;
      part.style.flexGrow = String(1 + 1000 * length);
    });
    const known = [...sums].filter(([kind]) => kind);
    if (legend.children.length !== known.length || known.some(([kind], i) => legend.children[i].dataset.kind !== kind)) {
      legend.replaceChildren(...known.map(([kind]) => h("li", { "data-kind": kind }, h("span", { class: `swatch area-back c${PHASES[kind][1]}`, "aria-hidden": "true" }),
        h("span", { class: "key" }, PHASES[kind][0]), " ", h("span", { class: "value" }))));
    }
    known.forEach(([, length], i) => { legend.children[i].lastChild.textContent = seconds(length); });
    ribbon.setAttribute("aria-label", `This ${STEP} so far: ${known.map(([kind, length]) => `${PHASES[kind][0]} ${seconds(length)}`).join(", ")}`);
  }

  setInterval(tick, 500);
  return { show };
}

/** Return a text to read: other control characters than line breaks and tabs become their code point. */
function readable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (letter) =>
    ("\n\t\u200c\u200d".includes(letter) ? letter : `\u27e8${letter.codePointAt(0).toString(16).toUpperCase()}\u27e9`));
}
