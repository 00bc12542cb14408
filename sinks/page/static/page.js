// The page: takes the frames of the stream of events, keeps the fleet, and shows it. sinks/page/frames.py says what a
// frame is.

import { Detail } from "./detail.js";
import { FleetMap, described, shade } from "./map.js";
import { MEANINGS, WORDS, bar, element, lasted, metricName, sign, time, who, written } from "./words.js";

const $ = (id) => document.getElementById(id);
const ROWS = 100;
const MOST_BARS = 30;
const STALE_MS = 6000;
const LOW = "(not known)";

const fleet = { nodes: new Map(), devices: new Map(), began: 0, at: 0, metrics: new Map(), alerts: [], usage: [] };
const shown = { group: "node", metric: "", search: "", only: null, table: false, page: 0, by: "team", order: "place", down: false };
let clusters = 1;
let cells = [];
let heard = 0;
let source = null;

// -- what frames say

function take(frame) {
  const started = performance.now();
  let reshaped = false;
  if (frame.kind === "all") {
    fleet.nodes.clear();
    fleet.began = frame.began_ms;
    fleet.metrics = new Map(frame.metrics.map(([key, unit, help]) => [key, { unit, help }]));
    fillMetrics();
    reshaped = true;
  }
  fleet.at = frame.at_ms;
  for (const [slot, cluster, name, zone, devices] of frame.nodes) {
    reshape(slot, cluster, name, zone, devices);
    reshaped = true;
  }
  for (const [slot, ts, words, values] of frame.now) {
    const node = fleet.nodes.get(slot);
    if (!node) continue;
    node.ts = ts;
    node.devices.forEach((device, place) => {
      device.word = words[place] ?? "s";
      device.value = frame.metric === shown.metric ? values[place] ?? null : null;
    });
  }
  if (reshaped) index();
  if (frame.kind === "all") {
    for (const role of ["cursor", "chosen"]) map[role] = fleet.devices.get(map[role]?.uuid) ?? null;
  }
  if (frame.alerts) fleet.alerts = frame.alerts;
  if (frame.alerts || reshaped) showAlerts(); // it shows where their devices are
  if (frame.usage) { fleet.usage = frame.usage; showUsage(); }
  if (reshaped) regroup();
  show();
  heard = performance.now();
  live(`live, ${new Date(frame.at_ms).toLocaleTimeString("en-GB")}`);
  document.body.dataset.updateMs = (performance.now() - started).toFixed(1);
  if (!document.body.dataset.painted) {
    map.drawNow();
    document.body.dataset.painted = performance.now().toFixed(0);
  }
}

function reshape(slot, cluster, name, zone, rows) {
  const before = fleet.nodes.get(slot);
  const node = { slot, cluster, name, zone, ts: before?.ts ?? 0, devices: [] };
  const known = new Map((before?.devices ?? []).map((device) => [device.uuid, device]));
  const cut = new Set(rows.map(([, , , , parent]) => parent).filter(Boolean)); // GPUs whose MIG devices stand for them
  for (const [uuid, index, model, profile, parent, since, holders] of rows) {
    const device = known.get(uuid) ?? { uuid, word: "f", value: null };
    Object.assign(device, { node, index, model: model ?? LOW, profile, parent, since, holders, cut: cut.has(uuid) });
    device.text = [cluster, name, zone, uuid, parent, model, profile, ...holders.flat()].join("\n").toLowerCase();
    node.devices.push(device);
  }
  fleet.nodes.set(slot, node);
}

// Of a device that two nodes have, that of the later tick counts: it has moved, or its node has another name now.
function index() {
  fleet.devices.clear();
  for (const node of [...fleet.nodes.values()].sort((a, b) => a.ts - b.ts)) {
    for (const device of node.devices) fleet.devices.set(device.uuid, device);
  }
}

// -- the map

function keyOf(device) {
  switch (shown.group) {
    case "zone": return device.node.zone || "(no zone)";
    case "model": return device.model;
    case "team": return together(device, (holder) => holder[3] || "(no team)");
    case "workload": return together(device, (holder) => inCluster(device.node, workloadName(holder)));
    default: return nodeName(device.node);
  }
}

function together(device, of) {
  const keys = new Set(device.holders.map(of));
  return keys.size === 0 ? "(held by nobody)" : keys.size === 1 ? [...keys][0] : "(shared by several)";
}

// A name that is unique within a cluster only.
function inCluster(node, name) {
  return clusters > 1 ? `${node.cluster}/${name}` : name;
}

const nodeName = (node) => inCluster(node, node.name);
const workloadName = ([namespace, pod, workload]) => `${namespace}/${workload || pod}`;

// Puts every GPU into its group. MIG devices share the tile of their GPU, which has none of its own then.
function regroup() {
  const words = shown.search.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map();
  const nodes = [...fleet.nodes.values()].sort((a, b) => compare(a.cluster, b.cluster) || compare(a.name, b.name));
  clusters = new Set(nodes.map((node) => node.cluster)).size;
  cells = [];
  for (const node of nodes) {
    const tiles = new Map();
    for (const device of node.devices) {
      if (device.cut || !words.every((word) => device.text.includes(word))) continue;
      const name = keyOf(device);
      const tile = `${device.parent ?? device.uuid}\n${name}`;
      if (!groups.has(name)) groups.set(name, { name, cells: [] });
      if (!tiles.has(tile)) {
        tiles.set(tile, []);
        groups.get(name).cells.push(tiles.get(tile));
      }
      tiles.get(tile).push(device);
      cells.push(device);
    }
  }
  let sorted = [...groups.values()];
  if (shown.group !== "node") sorted = sorted.sort((a, b) => a.name.startsWith("(") - b.name.startsWith("(") || b.cells.length - a.cells.length || compare(a.name, b.name));
  if (shown.group !== "node") for (const group of sorted) { group.title = group.name; group.name = `${group.name}  ${group.cells.length}`; }
  map.show(sorted, shown.group !== "node");
  const said = fleet.nodes.size === 0 ? "No tick has come yet." : "No GPU is found.";
  $("none").textContent = cells.length ? "" : said;
  $("none").hidden = cells.length > 0;
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

function tip(device, x, y) {
  const box = $("tip");
  box.hidden = !device;
  if (!device) return;
  box.textContent = lines(device).join("\n");
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 16 + height > innerHeight ? y - height - 12 : y + 16}px`;
}

function lines(device) {
  const said = [`${nodeName(device.node)} GPU ${device.index ?? "?"}${device.profile ? `, ${device.profile}` : ""}`, described(device)];
  const ofGpu = device.value === null && painted(device) !== null ? " of its GPU" : "";
  if (shown.metric) said.push(`${metricName(shown.metric)}${ofGpu}: ${written(painted(device), unitOf(shown.metric))}`);
  said.push(...device.holders.map(([namespace, pod, workload, team]) => [who([[namespace, pod]]), workload, team && `team ${team}`].filter(Boolean).join(", ")));
  said.push(`${device.holders.length ? "held" : "free"} for ${lasted(fleet.at - device.since)} or longer`, device.model);
  return said;
}

// The value that colours a device: a MIG device has no temperature or power of its own, but its GPU has.
const painted = (device) => device.value ?? fleet.devices.get(device.parent)?.value ?? null;

const unitOf = (key) => fleet.metrics.get(key)?.unit;

const map = new FleetMap($("map"), $("scroller"), $("spacer"), {
  shown: (device) => choose(device),
  over: tip,
  said: (device) => { $("said").textContent = lines(device).join(", "); },
});

const detail = new Detail($("detail"), {
  units: unitOf,
  closed: () => { map.chosen = null; map.draw(); (shown.table ? $("table") : $("map")).focus(); },
});

function choose(device) {
  map.chosen = device;
  map.draw();
  detail.open(device);
}

// -- everything that follows the fleet

function show() {
  const counts = { b: 0, i: 0, h: 0, f: 0, x: 0, s: 0 };
  const gpus = new Set();
  let [low, high] = [Infinity, -Infinity];
  for (const node of fleet.nodes.values()) {
    for (const device of node.devices) {
      gpus.add(device.parent ?? device.uuid);
      if (device.cut) continue;
      counts[device.word] = (counts[device.word] ?? 0) + 1;
      const value = painted(device);
      if (value !== null && value < low) low = value;
      if (value !== null && value > high) high = value;
    }
  }
  $("total").textContent = `${count(fleet.nodes.size, "node")}, ${count(gpus.size, "GPU")}`;
  showStates(counts);
  paint(low, high);
  showWho();
  if (shown.table) showTable();
  map.only = shown.only;
  map.draw();
}

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function showStates(counts) {
  const box = $("states");
  for (const word of Object.keys(WORDS)) {
    let button = box.querySelector(`[data-word="${word}"]`);
    if (!button) {
      button = element("button", { type: "button", "data-word": word, title: MEANINGS[word], "aria-pressed": "false",
        onclick: () => { shown.only = shown.only === word ? null : word; shown.page = 0; show(); } },
        sign(word), element("b"), element("span", {}, WORDS[word]));
      box.append(button);
    }
    button.querySelector("b").textContent = counts[word].toLocaleString("en");
    button.setAttribute("aria-pressed", String(shown.only === word));
    button.hidden = !counts[word] && shown.only !== word && (word === "s" || word === "h");
  }
}

// The colours of a metric run over what a ratio can be, or from zero to the most that is seen.
function paint(low, high) {
  const [key, box] = [shown.metric, $("scale")];
  box.hidden = !key;
  if (!key) { map.paint = null; return; }
  const unit = unitOf(key);
  const [from, to] = unit === "ratio" ? [0, 1] : [Math.min(0, low), high > -Infinity ? Math.max(high, 1e-9) : 1];
  map.paint = (device) => (painted(device) === null ? null : to > from ? (painted(device) - from) / (to - from) : 0);
  map.short = (value) => written(value, unit).replace(/ (%|W|°C)$/, "");
  let canvas = box.querySelector("canvas");
  if (!canvas) {
    canvas = element("canvas", { width: "160", height: "10", "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    for (let x = 0; x < 160; x++) { context.fillStyle = shade(x / 160); context.fillRect(x, 0, 1, 10); }
    box.append(element("span"), canvas, element("span"), element("span"));
  }
  const [first, , second, third] = box.children;
  [first.textContent, second.textContent] = [written(from, unit), written(to, unit)];
  third.textContent = `${fleet.metrics.get(key)?.help ?? ""} Without a value: plain.`;
}

function showWho() {
  const name = { team: (h) => h[3] || "(no team)", workload: workloadName, pod: (h) => `${h[0]}/${h[1]}` }[shown.by];
  const rows = new Map();
  for (const device of fleet.devices.values()) {
    if (device.cut) continue;
    const of = (holder) => (shown.by === "team" ? name(holder) : inCluster(device.node, name(holder)));
    for (const holder of new Set(device.holders.map(of))) {
      const row = rows.get(holder) ?? { name: holder, gpus: 0, b: 0, i: 0, x: 0 };
      row.gpus += 1;
      if (device.word in row) row[device.word] += 1;
      rows.set(holder, row);
    }
  }
  const sorted = [...rows.values()].sort((a, b) => b.gpus - a.gpus || compare(a.name, b.name));
  const most = sorted[0]?.gpus ?? 1;
  const items = sorted.slice(0, MOST_BARS).map((row) => item(row.name, `${count(row.gpus, "device")}${row.i ? `, ${row.i} idle` : ""}${row.x ? `, ${row.x} failing` : ""}`,
    [["b", (row.b / most) * 100], ["i", (row.i / most) * 100], ["x", (row.x / most) * 100], ["h", ((row.gpus - row.b - row.i - row.x) / most) * 100]],
    () => find(shown.by === "team" && row.name.startsWith("(") ? "" : row.name.split("/").pop())));
  if (sorted.length > MOST_BARS) items.push(element("li", { class: "faint" }, `and ${sorted.length - MOST_BARS} more: the table has all`));
  replace($("who"), items.length ? items : [element("li", { class: "faint" }, "Nobody holds a GPU.")]);
}

function item(name, text, parts, onclick) {
  const title = onclick ? element("button", { type: "button", class: "link", title: `Find ${name}`, onclick }, name) : element("span", { title: name }, name);
  return element("li", {}, element("div", { class: "head" }, title, element("span", {}, text)), bar(parts));
}

// Replaces a list unless somebody is in it with the keyboard.
function replace(list, items) {
  if (list.contains(document.activeElement)) return;
  const top = list.scrollTop;
  list.replaceChildren(...items);
  list.scrollTop = top;
}

function find(text) {
  $("search").value = shown.search = text;
  shown.page = 0;
  regroup();
  show();
}

function showAlerts() {
  map.alerted = new Set(fleet.alerts.flatMap((alert) => alert.gpus));
  const items = fleet.alerts.slice(0, 200).map((alert) => {
    const device = alert.gpus.map((uuid) => fleet.devices.get(uuid)).find(Boolean);
    const gpus = new Set(alert.gpus.map((uuid) => fleet.devices.get(uuid)?.parent ?? uuid)).size;
    const where = `${alert.node}${gpus > 1 ? `, ${gpus} GPUs` : ""}`;
    const place = device ? element("button", { type: "button", class: "link", onclick: () => choose(device) }, where) : element("span", {}, where);
    const head = element("div", { class: "head" }, element("b", {}, alert.name), element("span", { class: "faint" }, alert.severity), place);
    const said = element("p", {}, `${time(alert.since_ms)}: ${alert.summary}`);
    if (/^https?:\/\//.test(alert.runbook)) said.append(" ", element("a", { href: alert.runbook, target: "_blank", rel: "noopener noreferrer" }, "runbook"));
    return element("li", { class: ["critical", "warning"].includes(alert.severity) ? alert.severity : "" }, head, said);
  });
  if (fleet.alerts.length > 200) items.push(element("li", { class: "faint" }, `and ${fleet.alerts.length - 200} more`));
  $("alerts-title").textContent = fleet.alerts.length ? `Alerts that fire: ${fleet.alerts.length}` : "Alerts that fire";
  replace($("alerts"), items.length ? items : [element("li", { class: "faint" }, "None.")]);
}

function showUsage() {
  const most = fleet.usage[0]?.[1] ?? 1;
  const items = fleet.usage.slice(0, MOST_BARS).map(([team, held, idle]) => item(team, `${hours(held)} held, ${hours(idle)} idle`,
    [["b", ((held - idle) / most) * 100], ["i", (idle / most) * 100]]));
  replace($("usage"), items.length ? items : [element("li", { class: "faint" }, "gpu.usage has nothing yet: an hour is there when its first minute is closed.")]);
}

const hours = (value) => `${value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value < 1 ? 2 : 1)} h`;

// -- the table

const COLUMNS = [
  ["place", "Node and GPU", (d) => `${nodeName(d.node)} ${String(d.index ?? 0).padStart(3, "0")}`], ["word", "Is", (d) => WORDS[d.word]],
  ["value", "", (d) => d.value ?? -Infinity], ["who", "Held by", (d) => who(d.holders)],
  ["team", "Team", (d) => d.holders.map((holder) => holder[3]).join(", ")], ["since", "For", (d) => -d.since], ["model", "Model", (d) => d.model],
];

function showTable() {
  const columns = COLUMNS.filter(([key]) => key !== "value" || shown.metric);
  const chosen = cells.filter((device) => shown.only === null || device.word === shown.only);
  const by = COLUMNS.find(([key]) => key === shown.order)[2];
  const way = shown.down ? -1 : 1;
  chosen.sort((a, b) => way * compare(by(a), by(b)) || compare(COLUMNS[0][2](a), COLUMNS[0][2](b)));
  shown.page = Math.max(0, Math.min(shown.page, Math.ceil(chosen.length / ROWS) - 1));
  const [from, to] = [shown.page * ROWS, Math.min(chosen.length, (shown.page + 1) * ROWS)];
  $("range").textContent = chosen.length ? `${from + 1} to ${to} of ${chosen.length.toLocaleString("en")}` : "nothing";
  [$("before").disabled, $("after").disabled] = [shown.page === 0, to >= chosen.length];
  const rows = chosen.slice(from, to).map((device) => {
    const name = `${nodeName(device.node)} GPU ${device.index ?? "?"}${device.profile ? ` ${device.profile}` : ""}`;
    const row = element("tr", { "data-uuid": device.uuid, "data-ts": String(device.node.ts) });
    for (const [key] of columns) {
      if (key === "place") row.append(element("td", {}, element("button", { type: "button", onclick: () => choose(device) }, name)));
      else if (key === "word") row.append(element("td", {}, sign(device.word), WORDS[device.word]));
      else if (key === "value") row.append(element("td", { class: "number" }, written(device.value, unitOf(shown.metric))));
      else if (key === "who") row.append(element("td", { class: "wide" }, who(device.holders)));
      else if (key === "team") row.append(element("td", {}, device.holders.map((holder) => holder[3]).join(", ")));
      else if (key === "since") row.append(element("td", { class: "number" }, lasted(fleet.at - device.since)));
      else row.append(element("td", {}, device.model));
    }
    return row;
  });
  const heads = columns.map(([key, title]) => element("th", { scope: "col", class: ["value", "since"].includes(key) ? "number" : "",
    "aria-sort": shown.order === key ? (shown.down ? "descending" : "ascending") : "none" },
    element("button", { type: "button", onclick: () => { [shown.down, shown.order] = [shown.order === key && !shown.down, key]; $("rows").parentElement.focus(); showTable(); } },
      `${key === "value" ? metricName(shown.metric) : title}${shown.order === key ? (shown.down ? " ↓" : " ↑") : ""}`)));
  if (!$("heads").contains(document.activeElement)) $("heads").replaceChildren(...heads);
  replace($("rows"), rows);
}

// -- what is chosen

function fillMetrics() {
  const select = $("metric");
  if (select.options.length > 1) return;
  for (const key of fleet.metrics.keys()) select.append(element("option", { value: key }, metricName(key)));
  select.value = shown.metric;
}

$("search").addEventListener("input", (event) => { shown.search = event.target.value; shown.page = 0; regroup(); show(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("group").addEventListener("change", (event) => { shown.group = event.target.value; $("scroller").scrollTop = 0; regroup(); show(); });
$("metric").addEventListener("change", (event) => { shown.metric = event.target.value; for (const device of fleet.devices.values()) device.value = null; connect(); });
$("smaller").addEventListener("click", () => map.zoomBy(1 / 1.3));
$("larger").addEventListener("click", () => map.zoomBy(1.3));
$("before").addEventListener("click", () => { shown.page -= 1; showTable(); });
$("after").addEventListener("click", () => { shown.page += 1; showTable(); });
$("view").addEventListener("click", toggle);
for (const button of document.querySelectorAll("[data-by]")) {
  button.addEventListener("click", () => {
    shown.by = button.dataset.by;
    for (const other of document.querySelectorAll("[data-by]")) other.setAttribute("aria-pressed", String(other === button));
    showWho();
  });
}

function toggle() {
  shown.table = !shown.table;
  $("view").setAttribute("aria-pressed", String(shown.table));
  $("table").hidden = !shown.table;
  $("scroller").hidden = shown.table;
  show();
  if (!shown.table) map.lay();
}

document.querySelector(".skip").addEventListener("click", () => { if (!shown.table) toggle(); $("table").focus(); });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "Escape" && event.target === $("search")) { find(""); $("map").focus(); }
  else if (event.key === "Escape" && detail.uuid) detail.close();
  else if (event.key === "/" && !typing) { event.preventDefault(); $("search").focus(); }
  else if (event.key === "t" && !typing) toggle();
});

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* it lasts as long as the page then */ }
  map.restyle();
}

// -- the connection

function connect() {
  source?.close();
  source = new EventSource(`events?metric=${encodeURIComponent(shown.metric)}`);
  source.onmessage = (event) => take(JSON.parse(event.data));
  let busy = false;
  source.addEventListener("busy", () => { busy = true; live("too many pages are open; trying again", true); });
  source.onerror = () => {
    if (busy) busy = false; // the stream ends when it has said so
    else live(heard ? `not live: last heard at ${time(fleet.at)}; trying again` : "no answer; trying again", true);
    if (source.readyState === EventSource.CLOSED) later();
  };
}

let waiting = null;
function later() {
  clearTimeout(waiting);
  waiting = setTimeout(connect, 2000);
}

function live(text, stale = false) {
  $("status-text").textContent = text;
  if (stale) document.body.dataset.stale = "";
  else delete document.body.dataset.stale;
  $("since").textContent = fleet.began
    ? `History begins with the page's process, at ${new Date(fleet.began).toLocaleString("en-GB")}; it keeps an hour.` : "";
}

// A stream that is silent is dead. A page that nobody looks at gives its stream back.
setInterval(() => {
  if (document.hidden || !source) return;
  if (heard && performance.now() - heard > STALE_MS) {
    heard = performance.now();
    live(`not live: last heard at ${time(fleet.at)}; trying again`, true);
    connect();
  }
}, 1000);
let leaving = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => { source?.close(); source = null; }, 30_000);
  else if (!source) connect();
});

try { const theme = localStorage.getItem("theme"); if (theme) setTheme(theme); } catch { /* without storage */ }
connect();
