// The start of a live page, and its connection: events change the page in place.

const LIVE = DATA.live;
const SILENT_MS = 15000;
const HIDDEN_MS = 5000;
separateSteps();

const head = headLine();
const strip = phaseStrip(document.getElementById("phase"));
const grids = [];
const samples = LIVE.kind === "run" ? liveSamples() : null;
const extremesOfStep = LIVE.kind === "run" ? bestAndWorst() : null;
const now = { head: LIVE.head, phase: LIVE.phase ?? null, timeline: null, runs: [], names: [] };
let metrics = null;
let rewardCurve = null;

function add(id, grid) {
  document.getElementById(id).append(grid.element);
  grids.push(grid);
}

function start() {
  setClock(LIVE.now);
  if (LIVE.kind === "run") {
    add("curves", liveGrid(() => gridSpecs(USUAL), "No step is done yet."));
    add("mismatch", liveGrid(() => gridSpecs(MISMATCH), "No step is done yet."));
    document.getElementById("samples").append(samples.element);
    document.getElementById("best-and-worst").append(extremesOfStep.element);
    document.getElementById("timeline").append(h("div", { id: "lanes" }), h("div", { id: "staleness-place" }));
    add("timeline", liveGrid(() => gridSpecs(WAITING)));
  } else if (LIVE.kind === "service") {
    add("curves", liveGrid(() => gridSpecs(SERVICE), "No round is done yet."));
  } else {
    add("curves", liveGrid(() => ({ charts: (now.charts ?? []).map((spec) => ({ ...spec, format: formatOf(spec.title) })), note: "" }), "No run has a metric that is compared."));
  }
  if (LIVE.kind !== "comparison") {
    metrics = liveMetrics();
    add("all", metrics);
  }
  showAll(LIVE);
}

/** Show every part of a state of the server. */
function showAll(live) {
  for (const kind of Object.keys(PARTS)) if (live[kind] !== undefined) PARTS[kind](live[kind]);
  arrange();
}

/** Bring the charts to the keys that there are now, and draw those in view. */
function arrange() {
  if (LIVE.kind === "run" && !rewardCurve && SERIES["reward/mean"]) {
    rewardCurve = chart({ title: "Reward", keys: ["reward/mean"], labels: ["mean"], spread: { key: "reward/mean", by: "reward/std" }, note: "band: one standard deviation", height: 260 });
    document.getElementById("reward-curve").append(rewardCurve);
  } else if (rewardCurve && !SERIES["reward/mean"]) {
    forgetChart(rewardCurve);
    rewardCurve = null;
  }
  for (const grid of grids) grid.arrange();
  curvesHaveChanged();
}

const PARTS = {
  head(value) {
    now.head = value;
    head.show(value);
    showNotes(value.notes);
    if (JSON.stringify(value.failure) !== now.failure) showFailure(value.failure);
    now.failure = JSON.stringify(value.failure);
    strip.show(now.phase, now.head);
  },
  phase(value) {
    now.phase = value;
    strip.show(now.phase, now.head);
  },
  figures: showFigures,
  recipe: showFacts,
  samples(value) {
    samples.note(value);
    extremesOfStep.note(value, samples.follows());
  },
  timeline: showTimeline,
  tenants: showTenants,
  runs(value) {
    now.names = value.map(({ name, word, done }) => `${name} (${word}, ${done} steps)`);
  },
  outcomes(value) {
    showCompared("outcomes", "", now.names, value, "No reward, evaluation or mismatch yet.");
  },
  differences(value) {
    showCompared("differences", "key", now.names, value, "No key but output_dir.");
  },
  charts(value) {
    now.charts = value;
    arrange();
  },
};

/** Redraw the lanes, unless somebody is pointing at them; then they are drawn with a later step. */
function showTimeline(value) {
  const place = document.getElementById("lanes");
  const text = JSON.stringify([value.steps, value.why]);
  if (text !== now.timeline && !place.matches(":hover, :focus-within")) {
    now.timeline = text;
    place.replaceChildren(value.why ? h("p", { class: "note" }, value.why) : lanesFigure(value));
  }
  const bars = stalenessBars(value.staleness);
  document.getElementById("staleness-place").replaceChildren(...(bars ? [bars] : []));
}

/** The connection. Events that arrive while the whole state is asked for wait for it. */
const link = { source: null, epoch: LIVE.epoch, number: LIVE.number, heard: performance.now(), waiting: null, isOver: false, lostAt: null };

function connect() {
  if (link.isOver) return;
  if (link.source) link.source.close();
  const query = new URLSearchParams(location.search);
  query.set("after", `${link.epoch}.${link.number}`);
  const source = new EventSource(`events?${query}`);
  link.source = source;
  link.heard = performance.now();
  for (const kind of ["row", "reset", "reload", "alive", "bye", ...Object.keys(PARTS)]) source.addEventListener(kind, (event) => source === link.source && receive(kind, event));
  source.onerror = () => source === link.source && lost();
}

function lost() {
  link.lostAt = link.lostAt ?? new Date();
  head.connected(false, `no connection since ${link.lostAt.toLocaleTimeString()}; the page tries again`);
}

function receive(kind, event) {
  link.heard = performance.now();
  link.lostAt = null;
  const value = JSON.parse(event.data);
  if (kind === "alive") {
    setClock(value.now);
    head.connected(true, "live");
  } else if (kind === "bye") {
    link.isOver = true;
    link.source.close();
    head.connected(false, `the server of this page ended at ${new Date().toLocaleTimeString()}; the page shows what was there`);
  } else {
    take(kind, value, Number(event.lastEventId.split(".")[1]));
  }
}

function take(kind, value, place) {
  if (kind === "reload") location.reload();
  else if (kind === "reset") askForAll();
  else if (link.waiting) link.waiting.push([kind, value, place]);
  else if (place > link.number) {
    link.number = place;
    if (kind === "row") {
      if (addRow(value)) askForAll();
      arrangeSoon();
    } else PARTS[kind](value);
  }
}

let isArranging = false;

/** Arrange once for all rows that have come together. */
function arrangeSoon() {
  if (isArranging) return;
  isArranging = true;
  requestAnimationFrame(() => {
    isArranging = false;
    arrange();
  });
}

async function askForAll() {
  if (link.waiting) {
    link.asksAgain = true;
    return;
  }
  link.waiting = [];
  try {
    const state = await ask("state");
    replaceCurves(state.metrics);
    [link.epoch, link.number] = [state.live.epoch, state.live.number];
    setClock(state.live.now);
    showAll(state.live);
  } catch (error) {
    setTimeout(askForAll, 2000);
  }
  const waited = link.waiting;
  link.waiting = null;
  for (const each of waited) take(...each);
  if (link.asksAgain) {
    link.asksAgain = false;
    askForAll();
  }
}

/** A page that nobody sees is not connected, because a browser has few connections to one server. */
let hiddenTimer = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      link.source.close();
      link.source = null;
      head.connected(false, "paused, as the page is not seen");
    }, HIDDEN_MS);
  } else if (!link.source) connect();
});
setInterval(() => {
  const isQuiet = performance.now() - link.heard > SILENT_MS;
  if (document.hidden || link.isOver || !link.source) return;
  if (isQuiet || link.source.readyState === 2) {
    lost();
    connect();
  }
}, 2000);

start();
connect();
