// Keeps a page up to date while a run goes on, and asks runs for what the user wants.
"use strict";

const KEY = "elastic-dp token";
let token = sessionStorage.getItem(KEY) || "";
let pending = new Set();
let due = null;

function takeToken() { // from the address that was printed; it is never sent as part of an address
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    token = given;
    sessionStorage.setItem(KEY, token);
    history.replaceState(null, "", location.pathname);
  }
}

function ask(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body === undefined) return fetch(path, { headers });
  headers["Content-Type"] = "application/json";
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
}

function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

const wait = (ms) => new Promise((done) => { setTimeout(done, ms); });

// Resolves when the user has given a token.
function askForToken() {
  say("the token is needed");
  return new Promise((done) => {
    const given = el("input", { type: "password", autocomplete: "off", id: "token" });
    const form = el("form", { onsubmit: (event) => {
      event.preventDefault();
      token = given.value.trim();
      sessionStorage.setItem(KEY, token);
      form.remove();
      done();
    } }, el("label", {}, "Token ", given), " ", el("button", { class: "main" }, "Go on"));
    main.prepend(form);
    given.focus();
  });
}

// ----------------------------------------------------------------------------- following

const URGENT = ["events", "band", "phase", "decisions", "checkpoints", "generation"];

function showChanged() {
  const now = pending;
  pending = new Set();
  clearTimeout(due);
  due = null;
  if (now.size) show(now);
}

function change(list) {
  for (const [kind, path, value] of list) {
    const last = path[path.length - 1];
    const parent = path.slice(0, -1).reduce((at, key) => at[key], report);
    if (kind === "set") parent[last] = value;
    else parent[last].push(...value);
    pending.add(path[0]);
  }
  if (URGENT.some((part) => pending.has(part))) showChanged();
  else due ||= setTimeout(showChanged, 1000);
}

function receive(kind, data) {
  if (kind === "problem") return say(`the store does not answer: ${data}`);
  if (kind === "change") change(data);
  if (kind === "report") {
    const first = report === null;
    report = data;
    if (first) buildRunPage();
    show(null);
  }
  return say("live");
}

async function follow(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/.exec(part);
      if (found) receive(found[1], JSON.parse(found[2]));
    }
  }
}

const api = (name) => `/api/runs/${encodeURIComponent(name)}`;

async function followForEver() {
  for (;;) {
    try {
      const answer = await ask(`${api(settings.run)}/stream`);
      if (answer.status === 401) {
        await askForToken();
      } else if (!answer.ok) {
        say((await answer.json()).error);
        if (answer.status === 404) return;
      } else {
        await follow(answer);
      }
    } catch (error) {
      say("the connection is lost; trying again");
    }
    await wait(1000);
  }
}

// ----------------------------------------------------------------------------- steering

async function command(verb, body) {
  const told = $("told");
  told.textContent = "asking…";
  try {
    const answer = await ask(`${api(settings.run)}/${verb}`, body);
    const said = await answer.json();
    if (answer.status === 401) {
      await askForToken();
      await command(verb, body);
    } else {
      told.textContent = said.done || said.error;
    }
  } catch (error) {
    told.textContent = "the server does not answer";
  }
}

// The run goes back to work only if somebody starts it again, so this is asked twice.
function confirmStop() {
  const dialog = el("dialog", { "aria-labelledby": "stop-title" },
    el("h2", { id: "stop-title" }, "Stop the run?"),
    el("p", {}, "It ends after one of its next steps, with a checkpoint. Started again, it goes on from there."),
    el("form", { method: "dialog", class: "tools" },
      el("button", { class: "main", onclick: () => command("stop", {}) }, "Stop it"), el("button", {}, "Let it train")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function controls() {
  const size = el("input", { type: "number", min: "1", step: "1", required: true, id: "size", value: report.wanted || 1 });
  const scale = el("form", { onsubmit: (event) => {
    event.preventDefault();
    command("scale", { size: Number(size.value) });
  } }, el("label", {}, "Workers ", size), " ", el("button", { class: "main", id: "scale" }, "Scale"));
  return section("control", "Control", true, el("div", { class: "tools" }, scale,
    el("button", { type: "button", id: "checkpoint-now", onclick: () => command("checkpoint", {}) }, "Checkpoint now"),
    el("button", { type: "button", id: "stop", onclick: confirmStop }, "Stop the run")),
  el("p", { class: "note", role: "status", id: "told" }, "A worker is drained in the table of workers."));
}

function drainButton(row) {
  return el("button", { type: "button", "data-key": `drain ${row.name}`, "aria-label": `Drain ${row.name}`,
    onclick: () => command("drain", { worker: row.name }) }, "Drain");
}

// ----------------------------------------------------------------------------- the list

async function listForEver() {
  fill(main, section("runs", "Runs", true, el("div", { id: "runs-body" }, "reading the journals…")));
  for (;;) {
    try {
      const answer = await ask("/api/runs");
      const said = await answer.json();
      if (answer.status === 401) await askForToken();
      else if (!answer.ok) say(said.error);
      else {
        say("live");
        const rest = said.number > said.runs.length
          ? el("p", { class: "note", id: "rest" }, `${said.runs.length} of ${said.number} runs are shown, the first by name. The address /runs/NAME shows any other.`)
          : "";
        fill($("runs-body"), rest, table("Runs, the one that wrote last first",
          [["run"], ["phase", "kind"], ["step", "number"], ["goodput", "number"], ["last written", "time"], ["health"]],
          said.runs.map((run) => [
            el("a", { href: `/runs/${encodeURIComponent(run.name)}`, "data-key": `run ${run.name}` }, run.name),
            el("span", { class: TONES[run.phase] || "" }, run.phase), run.step, run.goodput === null ? "" : percent(run.goodput),
            when(run.last_line), run.health,
          ])));
      }
    } catch (error) {
      say("the connection is lost; trying again");
    }
    await wait(3000);
  }
}

takeToken();
if (settings.mode === "list") {
  listForEver();
} else {
  if (settings.several) fill($("up"), el("a", { href: "/" }, "All runs"));
  followForEver();
}
