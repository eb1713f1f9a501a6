// The parts of a live page that are text and tables. They change in place: what has not changed is not touched.

/** Set the text of an element, if it is another one. */
function say(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/** Make `parent` have one child for each item, by `make`, and let `fill(child, item)` bring it up to date. */
function keep(parent, items, make, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, i) => fill(parent.children[i], item));
}

function showFigures(figures) {
  keep(document.getElementById("figures"), figures, () => h("div", {}, h("dt", {}), h("dd", {}), h("dd", { class: "detail" })), (element, texts) => {
    texts.forEach((text, i) => say(element.children[i], readable(text)));
  });
}

function showFacts({ summary, text }) {
  const facts = document.getElementById("facts");
  if (!facts) return;
  keep(facts, summary, () => h("div", {}, h("dt", {}), h("dd", {})), (element, texts) => {
    texts.forEach((value, i) => say(element.children[i], readable(value)));
  });
  say(document.getElementById("recipe-text"), readable(text));
}

function showNotes(notes) {
  keep(document.getElementById("notes"), notes, () => h("li", {}), (element, text) => say(element, readable(text)));
}

function showFailure(failure) {
  const place = document.getElementById("failure");
  if (!failure) {
    place.replaceChildren();
    return;
  }
  const log = failure.log_tail ? h("details", {}, h("summary", {}, `The end of ${readable(failure.log || "the log")}`), h("pre", { tabindex: "0" }, readable(failure.log_tail))) : null;
  place.replaceChildren(h("div", { class: "warning failure" }, h("p", {}, h("strong", {}, readable(failure.what))),
    h("p", { class: "note" }, readable(`${failure.where ? `${failure.where}, ` : ""}${failure.when}`)),
    failure.command ? h("p", {}, "Continue with: ", h("code", {}, readable(failure.command))) : null, log));
}

/** Show rows of [name, [values]] below the names of the runs. */
function showCompared(id, corner, names, rows, none) {
  const table = document.getElementById(id);
  if (!table.tHead) table.append(h("thead", {}, h("tr", {})), h("tbody", {}));
  keep(table.tHead.rows[0], [corner, ...names], () => h("th", { scope: "col" }), (cell, text) => say(cell, readable(text)));
  const shown = rows.length ? rows : [[none, names.map(() => "")]];
  keep(table.tBodies[0], shown, () => h("tr", {}, h("th", { scope: "row" })), (row, [name, values]) => {
    say(row.cells[0], readable(name));
    while (row.cells.length > values.length + 1) row.lastElementChild.remove();
    while (row.cells.length < values.length + 1) row.append(h("td", {}));
    values.forEach((value, i) => say(row.cells[i + 1], readable(value)));
  });
}

function showTenants({ rows, newest, over_rounds: overRounds }) {
  const table = document.getElementById("tenant-table");
  const numbers = [...newest, ...overRounds];
  if (!table.tHead) {
    table.append(h("thead", {},
      h("tr", {}, h("td", { colspan: 4 }), h("th", { scope: "colgroup", colspan: newest.length }, "newest step"), h("th", { scope: "colgroup", colspan: overRounds.length }, "over all rounds"), h("td", {})),
      h("tr", {}, ["tenant", "state", "steps", "weight"].map((name) => h("th", { scope: "col" }, name)),
        numbers.map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col" }, "run"))), h("tbody", {}));
  }
  const lines = rows.flatMap((tenant) => [{ tenant }, ...(tenant.reason ? [{ reason: tenant.reason }] : [])]);
  const body = table.tBodies[0];
  if (!lines.length) {
    body.replaceChildren(h("tr", { class: "reason" }, h("td", { colspan: numbers.length + 5 }, "The service has no tenant yet: mrl tenants add RECIPE --service FOLDER.")));
    return;
  }
  lines.forEach((line, i) => {
    const kind = line.tenant ? "tenant" : "reason";
    let row = body.rows[i];
    if (!row || row.dataset.kind !== kind) {
      row = kind === "reason" ? h("tr", { class: "reason", "data-kind": kind }, h("td", {}), h("td", { colspan: numbers.length + 4 }))
        : h("tr", { "data-kind": kind }, h("th", { scope: "row" }, h("a", {})), h("td", {}), h("td", {}), h("td", { class: "number" }),
          numbers.map(() => h("td", { class: "number" })), h("td", {}));
      if (body.rows[i]) body.rows[i].replaceWith(row);
      else body.append(row);
    }
    if (line.reason) say(row.cells[1], readable(line.reason));
    else fillTenant(row, line.tenant);
  });
  while (body.rows.length > lines.length) body.lastElementChild.remove();
}

function fillTenant(row, tenant) {
  row.className = ["queued", "running", "paused", "done", "removed"].includes(tenant.state) ? tenant.state : "";
  const link = row.cells[0].firstElementChild;
  say(link, tenant.name);
  if (tenant.link) link.setAttribute("href", `?${tenant.link}&token=${encodeURIComponent(new URLSearchParams(location.search).get("token") ?? "")}`);
  else link.removeAttribute("href");
  [tenant.state, tenant.steps, tenant.weight, ...tenant.numbers, tenant.link_words].forEach((text, i) => say(row.cells[i + 1], readable(text)));
}

/** The line in the header: the state in a word, what is done, and whether the page is connected. */
function headLine() {
  const word = h("span", { class: "pill", id: "word" });
  const state = h("span", { id: "state" });
  const note = document.getElementById("state-note");
  const link = h("span", { class: "link-state", id: "link-state" });
  const place = document.querySelector("header p");
  place.replaceChildren(word, " ", state, " ", link);
  return {
    show(head) {
      word.className = `pill ${head.word}`;
      say(word, head.word);
      say(state, head.share_read === null ? readable(head.state) : `reading metrics.jsonl: ${Math.round(100 * head.share_read)}%`);
      say(note, head.note && head.note !== head.word ? readable(head.note) : "");
      const done = head.done === null ? "" : `${head.done}${head.planned ? `/${head.planned}` : ""} `;
      document.title = `${done}${readable(DATA.live.title)} - mrl view`;
    },
    connected(is, text) {
      link.classList.toggle("lost", !is);
      say(link, text);
    },
  };
}
