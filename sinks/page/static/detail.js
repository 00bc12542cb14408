// One GPU: what it does now, who holds it, and its last hour.

import { WORDS, MEANINGS, drawn, element, lasted, metricName, sign, time, who, written } from "./words.js";

const HOUR_MS = 3600_000;
const SHORTEST_MS = 5 * 60_000;
const READINGS = ["gpu_utilization_ratio", "memory_used_bytes", "power_watts", "temperature_celsius"];

export class Detail {
  constructor(panel, { units, closed }) {
    Object.assign(this, { panel, units, closed, uuid: null, asked: 0, opened: false });
    setInterval(() => { if (this.uuid && !document.hidden) this.ask(); }, 5000);
    panel.addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
  }

  open(device) {
    this.uuid = device.uuid;
    this.opened = true;
    this.panel.hidden = false;
    this.ask();
  }

  close() {
    this.uuid = null;
    this.panel.hidden = true;
    this.closed();
  }

  async ask() {
    const [uuid, number] = [this.uuid, ++this.asked];
    try {
      const answer = await fetch(`device?uuid=${encodeURIComponent(uuid)}`);
      if (number !== this.asked || uuid !== this.uuid) return;
      if (answer.ok) this.show(await answer.json());
      else this.panel.replaceChildren(this.head("not known any more"), element("p", { class: "faint" }, uuid));
    } catch { /* the server is away, which the head of the page says */ }
  }

  head(title) {
    return element("header", {}, element("h2", {}, title),
      element("button", { type: "button", "aria-label": "Close", onclick: () => this.close() }, "×"));
  }

  show(of) {
    const focused = this.panel.contains(document.activeElement);
    const showsAll = this.panel.querySelector("details")?.open ?? false;
    const scrolled = this.panel.querySelector("#holders")?.scrollTop ?? 0;
    const now = Math.max(of.ts_ms, of.first_ms + HOUR_MS);
    const facts = [
      ["is", `${WORDS[of.word]}: ${MEANINGS[of.word]}`], ["model", of.model ?? "not known"], ["cluster", of.cluster],
      ["UUID", of.uuid], ["read at", time(of.ts_ms)],
    ];
    if (of.attribution !== "exact") facts.push(["holders are", of.attribution]);
    if (of.conflict) facts.push(["conflict", of.conflict]);
    const xids = Object.entries(of.xids).map(([code, count]) => `${code} (${count}×)`).join(", ");
    if (xids) facts.push(["XID errors", xids]);
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
    const title = this.head(`${of.node} GPU ${of.index ?? "?"}${of.profile ? ` ${of.profile}` : ""}`);
    title.firstChild.prepend(sign(of.word), " ");
    title.firstChild.firstChild.setAttribute("class", "swatch");
    this.panel.replaceChildren(title, list, ...this.holders(of, now), ...this.charts(of), this.all(of, showsAll));
    this.panel.querySelector("#holders").scrollTop = scrolled;
    if (this.opened || focused) this.panel.querySelector("button").focus({ preventScroll: !this.opened });
    if (this.opened) this.panel.scrollIntoView({ block: "nearest" });
    this.opened = false;
  }

  // Who held it within the last hour, or since the history begins: a bar for each, and the same as a list.
  holders(of, now) {
    const first = of.holders[0][1];
    const begin = Math.max(now - HOUR_MS, Math.min(first, now - SHORTEST_MS));
    const place = (ms) => Math.max(0, Math.min(1000, ((ms - begin) / (now - begin)) * 1000));
    const svg = drawn("svg", { class: "time", viewBox: "0 0 1000 46", preserveAspectRatio: "none", role: "img",
      "aria-label": "Who held it within the last hour; the list below has the same" });
    const list = element("ul", { id: "holders" });
    svg.append(drawn("rect", { x: 0, y: 4, width: place(first), height: 24, class: "unknown" }));
    of.holders.forEach(([holders, from, to], number) => {
      const [left, right] = [place(from), place(to ?? now)];
      if (right <= 0) return;
      const kind = holders.length ? (number % 2 ? "span other" : "span") : "span nobody";
      const text = holders.length ? who(holders) : "nobody";
      svg.append(drawn("rect", { x: left, y: 4, width: Math.max(1.5, right - left), height: 24, class: kind },
        drawn("title", {}, text)));
      list.prepend(element("li", {}, element("span", {}, text),
        element("span", {}, `${number ? time(from) : `before ${time(from)}`} to ${to ? time(to) : "now"}, ${lasted((to ?? now) - from)}`)));
    });
    [...of.words].forEach((word, number) => {
      const [left, right] = [0, 1].map((more) => place(of.first_ms + (number + more) * of.step_ms));
      if (word !== " " && right > left) svg.append(drawn("rect", { x: left, y: 32, width: right - left, height: 10, class: `w-${word}` }));
    });
    return [element("h3", {}, "Who held it, and what it did"), svg,
      element("p", { class: "axis" }, element("span", {}, time(begin, false)),
        element("span", {}, first > begin ? `known since ${time(first)}` : ""), element("span", {}, time(now, false))), list];
  }

  charts(of) {
    return READINGS.filter((key) => of.metrics[key] !== undefined || of.readings[key].some((v) => v !== null)).flatMap((key) => {
      const begins = of.readings[key].findIndex((value) => value !== null);
      const count = Math.max(SHORTEST_MS / of.step_ms, begins < 0 ? 0 : of.readings[key].length - begins);
      const values = of.readings[key].slice(-count);
      const known = values.filter((value) => value !== null);
      const total = key === "memory_used_bytes" ? of.metrics.memory_total_bytes : key === "power_watts" ? of.metrics.power_limit_watts : null;
      const top = key.endsWith("_ratio") ? 1 : Math.max(1e-9, total ?? 0, ...known, key === "temperature_celsius" ? 100 : 0);
      const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${count - 1} 40`, preserveAspectRatio: "none", "aria-hidden": "true" });
      svg.append(drawn("line", { x1: 0, x2: count, y1: 39.5, y2: 39.5, class: "floor" }));
      let points = [];
      const line = () => {
        if (points.length === 1) points.unshift(points[0].replace(/^[\d.]+/, (x) => x - 0.5));
        if (points.length) svg.append(drawn("polyline", { points: points.join(" ") }));
        points = [];
      };
      values.forEach((value, x) => { if (value === null) line(); else points.push(`${x},${(39 - (value / top) * 37).toFixed(1)}`); });
      line();
      const range = known.length ? ` (${written(Math.min(...known), this.units(key))} to ${written(Math.max(...known), this.units(key))})` : "";
      return [element("h3", {}, element("span", {}, metricName(key) + range), element("b", {}, written(of.metrics[key], this.units(key)))), svg];
    });
  }

  all(of, open) {
    const list = element("dl");
    for (const key of Object.keys(of.metrics).sort()) {
      list.append(element("dt", {}, metricName(key)), element("dd", {}, written(of.metrics[key], this.units(key))));
    }
    const all = element("details", {}, element("summary", {}, "All metrics of its last tick"), list);
    all.open = open;
    return all;
  }
}
