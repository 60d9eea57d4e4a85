"use strict";
// The live page: asks the admin port once per second and draws the answer. No library, no build step.

const $ = id => document.getElementById(id);
const memory = { rows: [], fields: [], seen: 0, seconds: 300, timer: 0, failures: 0, labels: [], token: sessionStorage.getItem("token") || "" };

const TILES = [
  ["samples/s", s => perSecond("samples"), n => n.toFixed(n < 10 ? 1 : 0)],
  ["confidence", s => s.now.confidence, percent],
  ["entropy", s => s.now.entropy, n => n.toFixed(3), "nats"],
  ["disagreement", s => s.now.disagreement, percent],
  ["drift of weights", s => s.now.distance, small],
  ["weights restored", s => s.now.restored, percent],
  ["queue", s => s.queue, (n, s) => `${n} / ${s.queue_limit}`],
  ["batch", s => s.now.batch_ms, n => n.toFixed(n < 10 ? 1 : 0), "ms"],
  ["refused", s => s.totals.refused, n => n.toLocaleString("en")],
  ["updates skipped", s => s.now.skipped, n => n.toLocaleString("en")],
  ["guard alarms", s => s.guard ? s.totals.alarms : null, n => String(n), "", (n, s) => s.guard && n > 0],
  ["last checkpoint", s => s.checkpoint_age, age],
];
const CHARTS = [
  { title: "Drift from the source", series: [["distance", "rms distance", small]], low: 0 },
  { title: "Confidence", series: [["confidence", "confidence", percent], ["disagreement", "disagreement", percent]], low: 0, high: 1 },
  { title: "Throughput", series: [["samples", "samples/s", n => n.toFixed(0)], ["refused", "refused/s", n => n.toFixed(0)]], low: 0 },
];

function percent(n) { return (100 * n).toFixed(n === 0 || n >= 0.9995 ? 0 : 1) + "\u202f%"; }
function small(n) { return n === 0 ? "0" : n < 0.01 ? n.toExponential(1).replace(".0e", "e").replace("e-", "e−") : n.toFixed(3); }
const counted = name => name === "samples" || name === "refused";      // the last second may not be over yet
function age(n) { return n < 60 ? `${n.toFixed(0)} s` : n < 3600 ? `${(n / 60).toFixed(0)} min` : `${(n / 3600).toFixed(1)} h`; }
function clock(t, seconds) { return new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(seconds && { second: "2-digit" }), hour12: false }); }
function column(name) { return memory.fields.indexOf(name); }
function perSecond(name) {                     // the last five whole seconds
  const rows = memory.rows.slice(-6, -1);
  return rows.length ? rows.reduce((sum, row) => sum + row[column(name)], 0) / rows.length : null;
}
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { authorization: `Bearer ${memory.token}` }, cache: "no-store" });
  const content = await response.json().catch(() => ({}));
  if (response.status === 401) { login("This token is not valid."); throw new Error("unauthorized"); }
  if (!response.ok) throw new Error(content.error || `status ${response.status}`);
  return content;
}

function login(error) {
  clearTimeout(memory.timer);
  $("login").hidden = false; $("main").hidden = true;
  $("login-error").textContent = memory.token ? error : "";
  memory.token = ""; sessionStorage.removeItem("token");
  $("token").focus();
}

async function refresh() {
  clearTimeout(memory.timer);
  try {
    const last = memory.rows.length ? memory.rows[memory.rows.length - 1][0] - 1 : 0;
    const content = await ask(`api/live?since=${last}&seen=${memory.seen}`);
    memory.failures = 0;
    show(content, last);
  } catch (error) {
    if (error.message === "unauthorized") return;
    memory.failures += 1;
    state("off", "offline");
    $("about").textContent = `No answer from the server (${error.message}); trying again.`;
  }
  memory.timer = setTimeout(refresh, Math.min(1000 * 2 ** Math.min(memory.failures, 3), 8000));
}

function state(kind, text) { $("state").dataset.state = kind; $("state").textContent = text; }

function show(content, last) {
  const s = content.status;
  memory.fields = content.fields;
  if (memory.rows.length && content.history.length && content.history[0][0] > memory.rows[memory.rows.length - 1][0] + 1) memory.rows = [];
  memory.rows = memory.rows.filter(row => row[0] <= last).concat(content.history).slice(-900);
  memory.labels = s.labels;
  $("login").hidden = true; $("main").hidden = false;
  document.title = `${s.name} · petal serve`;
  $("name").textContent = s.name;
  $("method").textContent = s.method + (s.guard ? ` · guard ${s.guard}` : "");
  $("about").textContent = `petal ${s.petal} on ${s.device} · up ${age(s.uptime)} · ${s.totals.requests.toLocaleString("en")} requests, `
    + `${s.totals.samples.toLocaleString("en")} samples · ${s.steps.toLocaleString("en")} steps`;
  if (!s.ready) state("draining", "shutting down"); else if (s.frozen) state("frozen", "frozen"); else state("adapting", "adapting");
  $("version").textContent = s.version;
  $("freeze").disabled = s.frozen; $("thaw").disabled = !s.frozen;
  tiles(s); charts(); versions(content.versions, content.current); audit(content.audit);
  if (content.images) { memory.seen = content.seen; images(content.images); }
}

function tiles(s) {
  const parts = TILES.map(([what, value, format, unit, alert]) => {
    const n = value(s);
    const shown = n === null || n === undefined ? "–" : format(n, s);
    const tile = make("div", { class: alert && alert(n, s) ? "tile alert" : "tile" }, make("div", { class: "what" }, what));
    tile.append(make("div", { class: "value" }, shown, ...(unit && shown !== "–" ? [" ", make("span", { class: "unit" }, unit)] : [])));
    return tile;
  });
  $("tiles").replaceChildren(...parts);
}

const W = 400, H = 150, LEFT = 46, RIGHT = 6, TOP = 10, BOTTOM = 20;
function charts() {
  if (!$("charts").children.length) for (const chart of CHARTS) $("charts").append(frame(chart));
  for (const chart of CHARTS) draw(chart);
}
function frame(chart) {
  chart.legend = make("span", { class: "legend" });
  chart.svg = make("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img" });
  const move = event => {
    const box = chart.svg.getBoundingClientRect();
    chart.at = (event.clientX - box.left) / box.width; draw(chart);
  };
  chart.svg.addEventListener("pointermove", move);
  chart.svg.addEventListener("pointerleave", () => { chart.at = undefined; draw(chart); });
  return make("figure", { class: "chart" }, make("figcaption", {}, chart.title, chart.legend), chart.svg);
}
function nice(top) {
  if (!(top > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 2.5, 5, 10].map(n => n * power).find(n => n >= top * 0.999);
}
function draw(chart) {
  const rows = memory.rows, end = rows.length ? rows[rows.length - 1][0] : Date.now() / 1000;
  const seconds = Math.min(memory.seconds, Math.max(60, rows.length)), begin = end - seconds;
  const shown = rows.filter(row => row[0] >= begin);
  const width = Math.max(chart.svg.clientWidth || W, 200), height = chart.svg.clientHeight || H;   // in real pixels, so that letters are not distorted
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const values = chart.series.flatMap(([name]) => shown.map(row => row[column(name)])).filter(n => n !== null);
  const high = chart.high ?? nice(Math.max(0, ...values)), low = chart.low;
  const x = t => LEFT + (t - begin) / seconds * (width - LEFT - RIGHT);
  const y = n => height - BOTTOM - (n - low) / (high - low) * (height - TOP - BOTTOM);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const n = low + share * (high - low);
    parts.push(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(n), y2: y(n) }));
    parts.push(make("text", { x: LEFT - 6, y: y(n) + 4, "text-anchor": "end" }, chart.high === 1 ? `${100 * n}%` : high < 0.01 ? small(n) : String(+n.toPrecision(3))));
  }
  for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]])
    parts.push(make("text", { x: LEFT + share * (width - LEFT - RIGHT), y: height - 5, "text-anchor": anchor }, clock(begin + share * seconds, seconds <= 120)));
  let picked = shown[shown.length - 1];
  if (chart.at !== undefined && shown.length) {
    const t = begin + (chart.at * width - LEFT) / (width - LEFT - RIGHT) * seconds;
    picked = shown.reduce((best, row) => Math.abs(row[0] - t) < Math.abs(best[0] - t) ? row : best);
    parts.push(make("line", { class: "cursor", x1: x(picked[0]), x2: x(picked[0]), y1: TOP, y2: height - BOTTOM }));
  }
  chart.series.forEach(([name], number) => {
    const points = shown.slice(0, counted(name) ? -1 : undefined)
      .filter(row => row[column(name)] !== null).map(row => [x(row[0]), y(Math.min(row[column(name)], high))]);
    if (!points.length) return;
    const path = points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
    if (number === 0) parts.push(make("path", { class: "area", d: `${path}L${points[points.length - 1][0].toFixed(1)} ${y(low)}L${points[0][0].toFixed(1)} ${y(low)}Z` }));
    parts.push(make("path", { class: `line ${number ? "two" : "one"}`, d: path }));
  });
  chart.svg.replaceChildren(...parts);
  const legend = chart.series.flatMap(([name, words, format], number) => {
    const n = picked ? (chart.at === undefined && counted(name) ? perSecond(name) : picked[column(name)]) : null;
    return [make("span", { class: number ? "key two" : "key" }), `${words} ${n === null || n === undefined ? "–" : format(n)}`];
  });
  if (chart.at !== undefined && picked) legend.push(` at ${clock(picked[0], true)}`);
  chart.legend.replaceChildren(...legend);
  chart.svg.setAttribute("aria-label", `${chart.title}: ${chart.legend.textContent}`);
}

function named(label) { return memory.labels[label] ?? String(label); }
function images(list) {
  $("no-images").hidden = list.length > 0;
  $("images").replaceChildren(...list.map(one => {
    const side = (who, label, probability, kind) => make("div", { class: kind },
      make("div", { class: "who" }, who, make("span", {}, percent(probability))), make("div", { class: "label" }, named(label)),
      make("meter", { min: 0, max: 1, value: probability, "aria-label": `probability of ${named(label)}` }));
    const differs = one.label !== one.source_label;
    const picture = make("img", { src: `data:image/png;base64,${one.png}`, alt: "", width: 64, height: 64 });
    return make("li", differs ? { class: "differs" } : {}, picture, make("div", {},
      side("adapted", one.label, one.probability, "adapted"), side("source", one.source_label, one.source_probability, "source")));
  }));
}

function versions(list, current) {
  const focused = document.activeElement?.dataset?.version;
  $("versions").replaceChildren(...list.slice().reverse().map(v => {
    const button = make("button", { "data-action": "rollback", "data-version": v.number,
      "data-confirm": `Roll back to version ${v.number}? The current version is kept, so that you can return to it.`, "aria-label": `Roll back to version ${v.number}` }, "Roll back");
    button.disabled = v.number === current;
    const cell = (text, kind) => make("td", kind ? { class: kind } : {}, text);
    return make("tr", v.number === current ? { class: "current" } : {}, cell(String(v.number) + (v.number === current ? " · in service" : "")),
      cell(v.number === 0 ? "always" : clock(v.created, true)), cell(v.number === 0 ? "before adaptation" : v.reason, "wide"), cell(v.confidence === null ? "–" : percent(v.confidence), "num wide"),
      cell(v.distance === null ? "–" : small(v.distance), "num wide"), make("td", {}, button));
  }));
  if (focused !== undefined) document.querySelector(`#versions [data-version="${focused}"]`)?.focus();
}

function audit(list) {
  $("audit").replaceChildren(...list.map(entry => {
    const where = entry.before !== undefined ? ` ${entry.before} → ${entry.version}` : `, version ${entry.version}`;
    const why = entry.signal ? `: ${entry.signal} ${entry.value === null ? "not finite" : small(entry.value)}` : entry.resumed ? ", from the last checkpoint" : "";
    return make("li", {}, make("time", { datetime: entry.time }, clock(Date.parse(entry.time) / 1000, true)), `${entry.action}${where}${why} (${entry.by})`);
  }));
}

function sure(question) {
  return new Promise(resolve => {
    const dialog = $("confirm");
    $("question").textContent = question;
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

document.addEventListener("click", async event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.seconds) {
    memory.seconds = Number(button.dataset.seconds);
    document.querySelectorAll(".range button").forEach(b => b.setAttribute("aria-pressed", String(b === button)));
    charts();
  }
  const { action, version, confirm } = button.dataset;
  if (!action || (confirm && !await sure(confirm))) return;
  $("result").textContent = `${action} …`; $("result").className = "";
  try {
    const body = version === undefined ? undefined : JSON.stringify({ version: Number(version) });
    const done = await ask(`api/${action}`, { method: "POST", body });
    $("result").textContent = `Done: ${done.action}. Version ${done.version} is in service${done.frozen ? ", frozen" : ""}.`;
    refresh();
  } catch (error) {
    $("result").textContent = `${action} failed: ${error.message}`; $("result").className = "bad";
  }
});

$("login").addEventListener("submit", event => {
  event.preventDefault();
  memory.token = $("token").value.trim(); $("token").value = "";
  sessionStorage.setItem("token", memory.token);
  refresh();
});
addEventListener("resize", () => memory.rows.length && charts());
if (memory.token) refresh(); else login("");
