// Keeps a page up to date while a run goes on, and asks runs for what the user wants.
"use strict";

const KEY = "elastic-dp token";
let token = sessionStorage.getItem(KEY) || "";

function takeToken() { // from the address that was printed; it is never sent as part of an address
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    token = given;
    sessionStorage.setItem(KEY, token);
    history.replaceState(null, "", location.pathname);
  }
}

function ask(path, body, version) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (version) headers["If-None-Match"] = version;
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

async function followForEver() {
  let version = "";
  for (;;) {
    try {
      const answer = await ask("/api/report", undefined, version);
      if (answer.status === 401) {
        await askForToken();
      } else if (answer.ok) {
        const first = report === null;
        report = await answer.json();
        version = answer.headers.get("etag");
        if (first) buildRunPage();
        show();
      } else if (answer.status !== 304) {
        say((await answer.json()).error);
      }
      if (answer.ok || answer.status === 304) say(["finished", "failed"].includes(report.phase) ? "" : "live");
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
    const answer = await ask(`/api/${verb}`, body);
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
  if (confirm("Stop the run? It ends after one of its next steps, with a checkpoint. Started again, it goes on from there.")) {
    command("stop", {});
  }
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

takeToken();
followForEver();
