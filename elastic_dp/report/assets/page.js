// Shows a report. All text from a run becomes a text node, and never markup.
"use strict";

const settings = JSON.parse(document.getElementById("settings").textContent);
const $ = (id) => document.getElementById(id);
const main = $("main");
let report = null;
let hidden = new Set(); // kinds of events that are not shown
let allEvents = false;
let xAxis = "step";
let metric = "loss";

// ----------------------------------------------------------------------------- elements

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// Replaces the content of an element, and leaves the focus on the control that has it.
function fill(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const places = [...element.querySelectorAll(".scroll")].map((each) => each.scrollTop);
  element.replaceChildren(...children.flat());
  element.querySelectorAll(".scroll").forEach((each, i) => { each.scrollTop = places[i] || 0; });
  if (key) [...element.querySelectorAll("[data-key]")].find((each) => each.dataset.key === key)?.focus();
}

function section(id, title, wide, ...children) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, class: wide ? "" : "half", "aria-labelledby": `${id}-title` }, heading, ...children);
}

function table(caption, columns, rows) {
  const head = columns.map(([name, kind]) => el("th", { scope: "col", class: kind || "" }, name));
  const body = rows.map((row) => el("tr", {}, row.map((value, i) => el("td", { class: columns[i][1] || "" }, value))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

// ----------------------------------------------------------------------------- words

const two = (number) => String(number).padStart(2, "0");

function clock(time, digits = 0) {
  const at = new Date(time * 1000);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const ms = digits ? "." + String(at.getMilliseconds()).padStart(3, "0") : "";
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}${ms}`;
}

const when = (time) => (time === null ? "" : el("time", { datetime: new Date(time * 1000).toISOString() }, clock(time)));


function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds === 0) return "0 s";
  if (seconds < 0.01) return `${(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d`;
}

const percent = (part) => (part === null ? "unknown" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`);
const number = (value) => (value === null ? "not finite" : String(Number(value.toPrecision(5))));

// Plotly reads a few tags in texts; a name must show as it is.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ----------------------------------------------------------------------------- charts

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const KINDS = [ // kind, color, symbol
  ["start", "c6", "triangle-right"], ["takeover", "c6", "hourglass"], ["join", "c5", "triangle-up"],
  ["notice", "c3", "diamond-open"], ["loss", "bad", "x"], ["leave", "c6", "triangle-down"],
  ["eviction", "bad", "square-x-open"], ["pause", "c4", "line-ns-open"], ["rollback", "bad", "triangle-left"],
  ["checkpoint", "c1", "square"], ["scale", "c3", "star"], ["stop", "c6", "octagon"], ["slow", "c4", "hexagon"],
  ["error", "bad", "cross"], ["end", "c6", "octagon-open"],
];

function layout(more) {
  const axis = { gridcolor: color("line"), linecolor: color("line"), zerolinecolor: color("line"), automargin: true };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("text"), size: 13 },
    margin: { l: 50, r: 15, t: 10, b: 40 }, hovermode: "closest", dragmode: false,
    hoverlabel: { bgcolor: color("back"), font: { color: color("text") } },
    legend: { orientation: "h", y: -0.2, traceorder: "normal" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
    ...Object.fromEntries(Object.entries(rest).map(([name, value]) => [name, /^[xy]axis/.test(name) ? { ...axis, ...value } : value])),
  };
}

function draw(id, label, traces, more) {
  const chart = $(id);
  if (!chart || !window.Plotly) return;
  chart.setAttribute("aria-label", label);
  Plotly.react(chart, traces, layout(more), { displayModeBar: false, responsive: true });
}

function drawLoss() {
  const points = (report.curves[metric] || []).filter((point) => xAxis === "time" || point[3]);
  const x = points.map(([time, step]) => (xAxis === "time" ? clock(time, 3) : step));
  const last = points.length ? `, last value ${number(points[points.length - 1][2])}` : ", no values yet";
  draw("loss-chart", `${metric} over ${xAxis === "time" ? "time" : "steps"}${last}`, [{
    x, y: points.map((point) => point[2]), mode: points.length < 3 ? "markers" : "lines", name: plain(metric),
    line: { color: color("c1"), width: 2 }, hoverinfo: "x+y",
  }], { xaxis: { title: { text: xAxis === "time" ? "time" : "step" }, type: xAxis === "time" ? "date" : "linear" },
        yaxis: { title: { text: plain(metric) } }, showlegend: false });
}

function drawBand() {
  const band = report.band.slice();
  if (band.length) band.push([report.until, band[band.length - 1][1], band[band.length - 1][2]]);
  const x = band.map((size) => clock(size[0], 3));
  const most = Math.max(1, ...band.map((size) => Math.max(size[1], size[2])));
  const traces = [
    { x, y: band.map((size) => size[1]), name: "in the group", mode: "lines", fill: "tozeroy", hoverinfo: "x+y",
      line: { shape: "hv", color: color("c1") } },
    { x, y: band.map((size) => size[2]), name: "wanted", mode: "lines", hoverinfo: "x+y",
      line: { shape: "hv", dash: "dot", color: color("text") } },
  ];
  const present = KINDS.filter(([kind]) => !hidden.has(kind) && report.events.some((event) => event.kind === kind));
  for (const [kind, tone, symbol] of present) {
    const events = report.events.filter((event) => event.kind === kind);
    traces.push({
      x: events.map((event) => clock(event.time, 3)), y: events.map(() => kind), yaxis: "y2", mode: "markers",
      name: kind, showlegend: false, hoverinfo: "text", text: events.map((event) => plain(`${clock(event.time)} ${event.text}`.slice(0, 160))),
      marker: { symbol, size: 11, color: color(tone), line: { color: color(tone), width: 2 } },
    });
  }
  const shapes = hidden.has("pause") ? [] : report.events.filter((event) => event.kind === "pause").slice(-300)
    .map((event) => ({ type: "rect", xref: "x", yref: "paper", y0: 0, y1: 0.42, x0: clock(event.time, 3),
      x1: clock(event.time + event.seconds, 3), fillcolor: color("c4"), opacity: 0.35, line: { width: 0 } }));
  draw("band-chart", `${report.present} of ${report.wanted} workers; the events are in the table below`, traces, {
    shapes, xaxis: { type: "date", anchor: "y" }, legend: { orientation: "h", y: -0.12, traceorder: "normal" },
    // Plotly's own ticks of a few workers are at 0, 0.5, 1, …, which all would be shown as whole numbers.
    yaxis: { domain: [0, 0.42], rangemode: "tozero", title: { text: "workers" }, dtick: most < 10 ? 1 : undefined },
    yaxis2: { domain: [0.5, 1], type: "category", categoryarray: present.map(([kind]) => kind).reverse(), categoryorder: "array", fixedrange: true },
  });
}

const CATEGORIES = [
  ["useful", "useful"], ["redone", "redone"], ["pause", "pause"], ["data_wait", "waiting for data"],
  ["checkpoint", "checkpoint"], ["waiting_for_workers", "waiting for workers"],
];

// ----------------------------------------------------------------------------- sections

const workerName = (row) => (report.starts > 1 ? `${row.name} (start ${row.start})` : row.name);
const TONES = { running: "good", finished: "good", silent: "warn", failed: "bad" };

const SHOW = {
  verdict() {
    document.title = `${report.name}: ${report.phase}`;
    fill($("phase"), el("span", { class: `badge ${TONES[report.phase] || "warn"}` }, report.phase));
    const newest = report.checkpoints[report.checkpoints.length - 1];
    const tiles = [
      ["step", report.step], ["workers", report.wanted ? `${report.present} of ${report.wanted}` : "none"], ["goodput", percent(report.goodput.fraction)],
      ["workers lost", report.lost], ["generation", report.generation], ["newest checkpoint", newest ? `step ${newest.step}` : "none"],
      ["trained for", duration(report.led_s) || "unknown"],
    ];
    fill($("verdict-body"), ...report.verdict.map((sentence) => el("p", {}, sentence)),
      el("dl", { class: "tiles" }, tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { id: `tile-${name.replaceAll(" ", "-")}` }, value)))));
  },
  loss() {
    const names = Object.keys(report.curves);
    if (!names.includes(metric) && names.length) metric = names[0];
    fill($("metric"), names.map((name) => el("option", { value: name, selected: name === metric }, name)));
    drawLoss();
  },
  band() {
    const kinds = KINDS.map(([kind]) => kind).filter((kind) => report.events.some((event) => event.kind === kind));
    fill($("kinds"), el("legend", {}, "Events:"), kinds.map((kind) => el("label", {},
      el("input", { type: "checkbox", "data-key": `kind ${kind}`, checked: !hidden.has(kind), onchange: (event) => {
        if (event.target.checked) hidden.delete(kind); else hidden.add(kind);
        SHOW.band(); SHOW.events();
      } }), ` ${kind}`)));
    drawBand();
  },
  goodput() {
    const total = CATEGORIES.reduce((sum, [name]) => sum + (report.goodput[name] || 0), 0);
    fill($("goodput-body"), table("Worker-seconds by what they were for", [["what"], ["time", "number"], ["share", "number"]],
      CATEGORIES.map(([name, words]) => [words, duration(report.goodput[name]), total ? percent(report.goodput[name] / total) : ""])));
  },
  workers() {
    const rows = report.workers.slice().reverse();
    const columns = [["worker", "kind"], ["condition", "kind"], ["node"], ["steps", "number"], ["step time", "number"],
      ["waited for data", "number"], ["computed", "number"], ["in collectives", "number"], ["redone", "number"], ["paused", "number"], ["reason"]];
    if (settings.control) columns.push(["control"]);
    fill($("workers-body"), table("Workers, the newest first", columns, rows.map((row) => [
      workerName(row), row.condition, row.node.slice(0, 12), row.steps, duration(row.step_s), duration(row.times.data), duration(row.times.compute),
      duration(row.times.collective), duration(row.times.redone), duration(row.times.pause), row.reason,
      ...(settings.control ? [row.until === null ? drainButton(row) : ""] : []),
    ])));
  },
  events() {
    const shown = report.events.filter((event) => !hidden.has(event.kind)).reverse();
    const most = allEvents ? shown.length : 200;
    const more = shown.length > most
      ? [el("p", {}, el("button", { type: "button", "data-key": "all events", onclick: () => { allEvents = true; SHOW.events(); } }, `Show all ${shown.length} events`))] : [];
    fill($("events-body"), table("Events, the newest first", [["time", "time"], ["event", "kind"], ["step", "number"], ["what happened"], ["took", "number"]],
      shown.slice(0, most).map((event) => [when(event.time), event.kind, event.step, event.text, duration(event.seconds)])), ...more);
  },
  checkpoints() {
    fill($("checkpoints-body"), table("Checkpoints, the newest first", [["step", "number"], ["committed", "time"], ["took", "number"], ["stored"]],
      report.checkpoints.slice().reverse().map((row) => [row.step, when(row.time), duration(row.seconds), row.stored ? "yes" : "deleted"])));
  },
  decisions() {
    fill($("decisions-body"), table("Decisions and their reasons, the newest first", [["time", "time"], ["decision"]],
      report.decisions.slice(-500).reverse().map((decision) => [when(decision.time), decision.text])));
  },
};

function chart(id, size) {
  return el("div", { id, class: `chart ${size || ""}`, role: "img", "aria-label": "a chart" });
}

function choice(name, value, words, checked, act) {
  return el("label", {}, el("input", { type: "radio", name, value, checked, onchange: act }), ` ${words}`);
}

function buildRunPage() {
  const byAxis = (event) => { xAxis = event.target.value; drawLoss(); };
  const byMetric = (event) => { metric = event.target.value; drawLoss(); };
  fill(main,
    section("verdict", "Verdict", true, el("div", { id: "verdict-body", class: "verdict" })),
    ...(settings.control ? [controls()] : []),
    section("band", "Workers and events", true, el("div", { class: "tools" }, el("fieldset", { id: "kinds" })), chart("band-chart", "tall")),
    section("loss", "Metrics", false,
      el("div", { class: "tools" },
        el("label", {}, "Metric ", el("select", { id: "metric", onchange: byMetric })),
        el("fieldset", {}, el("legend", {}, "Over:"), choice("x", "step", "steps", true, byAxis), choice("x", "time", "time", false, byAxis))),
      chart("loss-chart")),
    section("goodput", "Goodput", false, el("div", { id: "goodput-body" })),
    section("checkpoints", "Checkpoints", true, el("div", { id: "checkpoints-body" })),
    section("workers", "Workers", true, el("div", { id: "workers-body" })),
    section("events", "Events", false, el("div", { id: "events-body" })),
    section("decisions", "Decisions", false, el("div", { id: "decisions-body" })));
}

function show() {
  Object.values(SHOW).forEach((each) => each());
}

// ----------------------------------------------------------------------------- start

// A chart has the colors of the moment in which it was drawn.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (report) show(); });
if (settings.mode === "report") {
  report = JSON.parse($("report").textContent);
  buildRunPage();
  show();
}
