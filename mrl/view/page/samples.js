// The sample browser: choose a step and a sample, and read the tokens of the sample.

const ORDERS = [
  ["max_d", "largest |\u0394|", (sample) => -(sample.max_d ?? -1)],
  ["advantage", "largest |advantage|", (sample) => -Math.abs(sample.top_advantage ?? 0)],
  ["high", "highest reward", (sample) => -(sample.reward ?? -Infinity)],
  ["low", "lowest reward", (sample) => sample.reward ?? Infinity],
  ["number", "number", (sample) => sample.id],
];

const browser = { step: null, sample: null, token: null, colouring: "d", order: "max_d", goTo: () => {} };

function sampleBrowser() {
  if (!DATA.steps.length) return h("p", { class: "note" }, "No token records in this page; see the notes under Run.");
  const list = h("div", { class: "scroll tall sample-list" });
  const detail = h("div", { class: "sample-detail" });
  const findings = h("ul", { class: "findings" });
  const about = h("p", { class: "note", id: "about-step" });
  const steps = select("Step", DATA.steps.map((step, i) => [i, String(step.step)]), (i) => showStep(Number(i)));
  const orders = select("Sorted by", ORDERS.map(([name, text]) => [name, text]), (name) => { browser.order = name; showList(); });
  const turn = (by) => {
    const i = Number(steps.box.value) + by;
    if (i >= 0 && i < DATA.steps.length) showStep(i);
  };
  const buttons = [["Previous step", "\u2039", -1], ["Next step", "\u203a", 1]].map(([name, text, by]) =>
    h("button", { type: "button", class: "small", "aria-label": name, onclick: () => turn(by) }, text));

  function showStep(i) {
    browser.step = DATA.steps[i];
    steps.box.value = String(i);
    const { samples, num_samples: all, version, temperature, replay } = browser.step;
    about.textContent = `${samples.length} of the ${all} samples of step ${browser.step.step}; trainer's weights ${version}, temperature ${number(temperature)}, routing replay ${replay}.`;
    findings.replaceChildren(...browser.step.findings.map(findingLine));
    browser.sample = null;
    showList();
  }

  function showList() {
    const by = ORDERS.find(([name]) => name === browser.order)[2];
    const sorted = [...browser.step.samples].sort((a, b) => by(a) - by(b));
    if (!browser.sample) [browser.sample] = sorted;
    list.replaceChildren(sampleTable(sorted, pick));
    mark();
    detail.replaceChildren(...(browser.sample ? [sampleDetail(browser.sample, browser.step)] : [h("p", { class: "note" }, "No sample of this step is in the page.")]));
  }

  function pick(sample) {
    browser.sample = sample;
    mark();
    detail.replaceChildren(sampleDetail(sample, browser.step));
  }

  function mark() {
    for (const row of list.querySelectorAll("tr[data-sample]")) {
      const on = browser.sample && row.dataset.sample === String(browser.sample.id);
      row.classList.toggle("picked", Boolean(on));
      row.querySelector("button").setAttribute("aria-pressed", String(Boolean(on)));
    }
  }

  browser.goTo = (step) => {
    const at = DATA.steps.findIndex((held) => held.step === step);
    if (at < 0) return;
    showStep(at);
    document.getElementById("samples").scrollIntoView();
  };
  const colours = select("Colour", COLOURINGS, (kind) => { browser.colouring = kind; if (browser.sample) pick(browser.sample); });
  showStep(DATA.steps.length - 1);
  return h("div", {}, h("p", { class: "choices" }, steps.element, buttons, orders.element, colours.element), about, findings, list, detail);
}

function findingLine({ name, severity, text }) {
  return h("li", { class: severity >= 0.1 ? "severe" : null }, h("strong", {}, name.replaceAll("_", " ")), `, severity ${number(severity)}: ${text}.`);
}

function sampleTable(samples, pick) {
  const columns = [["prompt \u2192 completion", (s) => (s.text ? visible(s.text) : "\u2013")], ["reward", (s) => number(s.reward)], ["advantage", (s) => number(s.top_advantage)], ["max |\u0394|", (s) => number(s.max_d)],
    ["mean |\u0394|", (s) => number(s.mean_d)], ["extreme", (s) => String(s.num_extreme)], ["tokens", (s) => `${s.num_loss_tokens} / ${s.num_tokens}`],
    ["group", (s) => s.group_id ?? "\u2013"], ["end", (s) => s.finish_reason ?? "\u2013"], ["source", (s) => s.source ?? s.prompt_id ?? "\u2013"]];
  return h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "sample"), columns.map(([name]) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, samples.map((sample) => h("tr", { "data-sample": sample.id, onclick: () => pick(sample) },
      h("th", { scope: "row" }, h("button", { type: "button", class: "small", "aria-label": `Sample ${sample.id}` }, String(sample.id))),
      columns.map(([, value]) => h("td", {}, String(value(sample))))))));
}

/** Show a sample as coloured tokens, beside a panel about the token under the pointer or chosen by the arrow keys. */
function sampleDetail(sample, step) {
  const panel = h("div", { class: "token-panel", "aria-live": "polite" }, h("p", { class: "note" }, "Point at a token, or move with the arrow keys."));
  const spans = tokenSpans(sample, step);
  const text = h("div", { class: "tokens", role: "group", tabindex: "0", "aria-label": `Tokens of sample ${sample.id}` }, spans);
  let pinned = -1;
  let shown = -1;

  function show(token) {
    if (token === shown) return;
    spans[shown]?.classList.remove("shown");
    shown = token;
    browser.token = token;
    spans[token]?.classList.add("shown");
    panel.replaceChildren(tokenPanel(sample, step, token));
  }

  function pin(token) {
    spans[pinned]?.classList.remove("pinned");
    pinned = token === pinned ? -1 : token;
    spans[pinned]?.classList.add("pinned");
    show(token);
  }

  const tokenAt = (event) => {
    const span = event.target.closest?.("[data-token]");
    return span ? Number(span.dataset.token) : -1;
  };
  text.addEventListener("pointerover", (event) => { if (pinned < 0 && tokenAt(event) >= 0) show(tokenAt(event)); });
  text.addEventListener("click", (event) => { if (tokenAt(event) >= 0) pin(tokenAt(event)); });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    const end = { Home: 0, End: spans.length - 1 }[event.key];
    if (by === undefined && end === undefined) return;
    event.preventDefault();
    const to = end ?? Math.min(spans.length - 1, Math.max(0, shown < 0 ? firstLoss(sample, step) : shown + by));
    show(to);
    spans[to].scrollIntoView({ block: "nearest" });
  });
  return h("div", {}, h("p", { class: "note" }, legendOf(browser.colouring), h("br"), "Grey: prompt, and tokens outside the loss. A click holds a token."),
    h("div", { class: "reader" }, text, panel));
}

function firstLoss(sample, step) {
  return Math.max(0, unpack(sample, step).mask.indexOf(1));
}

function tokenSpans(sample, step) {
  const { mask, differing } = unpack(sample, step);
  const shade = shades(browser.colouring, sample, step);
  return sample.tokens.map((id, i) => {
    const extreme = mask[i] && (sample.d[i] === null || Math.abs(sample.d[i]) > EXTREME);
    const names = ["token", mask[i] ? "" : "off", extreme ? "extreme" : "", differing[i] ? "rerouted" : ""];
    const span = h("span", { class: names.filter(Boolean).join(" "), "data-token": i }, visible(step.pieces[id]));
    if (shade[i] !== null) span.style.backgroundColor = tint(shade[i]);
    return span;
  });
}
