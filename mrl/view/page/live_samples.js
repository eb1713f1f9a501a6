// The samples of a live page: the best and the worst of a step, the list of a step, and a sample as a conversation.
// A step that comes is announced. What is read stays until another step or sample is chosen.

const SAMPLE_ORDERS = [
  ["number", "number", (sample) => sample.number],
  ["high", "highest reward", (sample) => -(sample.reward ?? -Infinity)],
  ["low", "lowest reward", (sample) => sample.reward ?? Infinity],
  ["long", "longest", (sample) => -(sample.response_len ?? 0)],
];
const NUM_CARDS = 2;

/** Ask the server. `what` is the last part of the address, and the query of the page goes along. */
async function ask(what, more = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(more)) query.set(name, value);
  const answer = await fetch(`${what}?${query}`);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || `status ${answer.status}`);
  return content;
}

/** A line that says that newer samples are there, with a button to show them. */
function announcement(onShow) {
  const text = h("span", {});
  const button = h("button", { type: "button", class: "small", onclick: onShow }, "show");
  const element = h("span", { class: "announced", hidden: true, "aria-live": "polite" }, text, button);
  return {
    element,
    set(step, shown) {
      element.hidden = step === null || step === shown;
      if (!element.hidden) text.textContent = `Samples of step ${step} are there.`;
    },
  };
}

function bestAndWorst() {
  const heading = h("span", {});
  const news = announcement(() => show(newest));
  const cards = h("div", { class: "conversations" });
  const element = h("div", {}, h("h3", {}, heading, news.element), cards);
  let shown = null;
  let newest = null;

  async function show(step) {
    if (step === null) return;
    const before = shown;
    shown = step;
    news.set(newest, shown);
    try {
      const { samples } = await ask("samples", { step });
      const chosen = extremes(samples);
      const whole = await Promise.all(chosen.map(({ number: n }) => ask("sample", { step, number: n })));
      heading.textContent = chosen.length ? `Best and worst samples of step ${step}` : `No sample of step ${step} has a reward`;
      cards.replaceChildren(...whole.map((sample, i) => card(sample, chosen[i].name)));
    } catch (error) {
      shown = before;
      if (before === null) heading.textContent = `The samples of step ${step} could not be read: ${readable(error.message)}`;
      news.set(newest, shown);
    }
  }

  return { element, note(samples, follows) {
    newest = samples.newest;
    const isGone = shown !== null && (newest === null || newest < shown);
    if (shown === null || follows || isGone) show(newest);
    else news.set(newest, shown);
  } };
}

/** Return the samples with the highest and the lowest reward, of different groups, with their `name`. */
function extremes(samples) {
  const scored = samples.filter(({ reward }) => reward !== null).sort((a, b) => a.reward - b.reward);
  const groups = (list) => {
    const found = new Map();
    for (const sample of list) if (!found.has(sample.group_id) && found.size < NUM_CARDS) found.set(sample.group_id, sample);
    return [...found.values()];
  };
  if (!scored.length) return [];
  const top = scored[scored.length - 1].reward;
  const below = scored.filter(({ reward }) => reward < top);
  const worst = groups(below.length ? below : scored);
  const best = groups([...scored].reverse().filter(({ reward }) => reward > worst[worst.length - 1].reward));
  return [...best.map((sample) => ({ ...sample, name: "best" })), ...worst.map((sample) => ({ ...sample, name: "worst" }))];
}

function card(sample, name) {
  return h("article", { class: `conversation card ${name}`, tabindex: "0" }, h("h4", {}, `${name}, reward ${number(sample.reward)}`), sample.turns.map(said));
}

function liveSamples() {
  const list = h("div", { class: "scroll tall sample-list", tabindex: "0" });
  const about = h("p", { class: "note", id: "about-step" });
  const detail = h("div", { id: "dialogue" });
  const box = h("input", { type: "number", min: "0", id: "step-box", "aria-label": "Step", onchange: () => box.value !== "" && show(Number(box.value)) });
  const turn = (text, name, find) => h("button", { type: "button", class: "small", "aria-label": name, onclick: () => show(find()) }, text);
  const orders = select("Sorted by", SAMPLE_ORDERS.map(([name, text]) => [name, text]), () => showList());
  const follow = h("input", { type: "checkbox", id: "follow", onchange: () => follow.checked && arrived() });
  const news = announcement(() => show(range.newest));
  let range = { first: null, newest: null };
  let step = null; // the step whose list is shown
  let held = null; // the answer of the server about it
  let picked = null;
  let asked = 0;
  const controls = h("div", { class: "bar-of-samples" }, h("span", { class: "choice" }, "Step ", turn("\u2039", "Previous step", () => held?.before ?? null), box,
    turn("\u203a", "Next step", () => held?.after ?? null)), orders.element, h("label", { class: "choice" }, follow, " always show the newest step"), news.element);

  async function show(wanted) {
    if (wanted === null || wanted === undefined) return;
    const mine = (asked += 1);
    try {
      const found = await ask("samples", { step: wanted });
      if (mine !== asked) return;
      [held, step] = [found, wanted];
      picked = null;
      detail.replaceChildren();
      showList();
    } catch (error) {
      about.textContent = `Step ${wanted}: ${readable(error.message)}`;
    }
    box.value = String(step ?? wanted);
    news.set(range.newest, step);
  }

  function showList() {
    if (!held) return;
    const by = SAMPLE_ORDERS.find(([name]) => name === orders.box.value)[2];
    const sorted = [...held.samples].sort((a, b) => by(a) - by(b));
    about.textContent = [`${held.num_samples} samples of step ${step}.`, ...held.notes, picked === null ? "Choose one to read it." : ""].join(" ");
    list.replaceChildren(listOf(sorted));
    mark();
  }

  function listOf(samples) {
    const columns = [["prompt \u2192 completion", (s) => (s.text ? readable(s.text) : "\u2013")], ["reward", (s) => number(s.reward)], ["advantage", (s) => number(s.advantage)],
      ["tokens", (s) => number(s.response_len)], ["end", (s) => s.finish_reason ?? "\u2013"], ["group", (s) => s.group_id ?? "\u2013"],
      ["weights", (s) => s.weight_version ?? "\u2013"], ["source", (s) => readable((s.source ?? "\u2013").split("/").pop())]];
    return h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "sample"), columns.map(([name]) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, samples.map((sample) => h("tr", { "data-sample": sample.number, onclick: () => pick(sample.number) },
        h("th", { scope: "row" }, h("button", { type: "button", class: "small", "aria-label": `Sample ${sample.number}` }, String(sample.number))),
        columns.map(([, value]) => h("td", {}, String(value(sample))))))));
  }

  async function pick(wanted, raw = 0) {
    const mine = (asked += 1);
    try {
      const sample = await ask("sample", { step, number: wanted, raw });
      if (mine !== asked) return;
      picked = wanted;
      detail.replaceChildren(dialogue(sample, raw, () => pick(wanted, 1 - raw), () => { picked = null; detail.replaceChildren(); mark(); }));
    } catch (error) {
      detail.replaceChildren(h("p", { class: "warning" }, readable(error.message)));
    }
    mark();
  }

  function mark() {
    for (const row of list.querySelectorAll("tr[data-sample]")) row.classList.toggle("picked", row.dataset.sample === String(picked));
  }

  /** Show the newest step where nothing is read, and announce it otherwise. */
  function arrived() {
    const isGone = step !== null && (range.newest === null || range.newest < step);
    if (range.newest === null) about.textContent = "No samples yet: those of a step are there when it begins to train.";
    else if (step === null || isGone || (follow.checked && picked === null)) show(range.newest);
    else news.set(range.newest, step);
    box.max = range.newest === null ? "" : String(range.newest);
  }

  return { element: h("div", {}, controls, about, list, detail), follows: () => follow.checked, note(samples) {
    range = samples;
    arrived();
  } };
}

/** A sample as a conversation, with its numbers. */
function dialogue(sample, raw, onRaw, onClose) {
  const facts = [["reward", number(sample.reward)], ["advantage", number(sample.advantage)], ["tokens", number(sample.response_len)], ["end", sample.finish_reason ?? "\u2013"],
    ["weights", sample.weight_version ?? "\u2013"], ["source", sample.source ?? "\u2013"],
    ...Object.entries(sample.reward_parts).map(([name, value]) => [`reward: ${name}`, number(value)])];
  return h("article", { class: "dialogue" },
    h("h3", {}, `Sample ${sample.number} of step ${sample.step}`,
      h("button", { type: "button", class: "small", "aria-pressed": String(Boolean(raw)), onclick: onRaw }, "text as it is"),
      h("button", { type: "button", class: "small", "aria-label": "Close the sample", onclick: onClose }, "\u00d7")),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, readable(name)), h("dd", {}, readable(value))))),
    sample.turns.map(said));
}

function said({ role, parts }) {
  const known = ["assistant", "user", "tool", "system", "prompt"].includes(role) ? role : "";
  return h("div", { class: `said ${known}` }, h("span", { class: "role" }, readable(role)), parts.map(([kind, name, text]) => {
    const shown = readable(text);
    if (kind === "thought") return h("details", {}, h("summary", {}, `thought, ${text.length} characters`), h("p", {}, shown));
    if (kind === "call" || kind === "result") {
      return h("div", { class: kind === "call" ? "tool-call" : "tool-result" },
        h("span", { class: "tool-name" }, kind === "call" ? "calls " : "result ", h("b", {}, readable(name))), h("pre", { tabindex: "0" }, shown));
    }
    return h("p", {}, shown);
  }));
}
