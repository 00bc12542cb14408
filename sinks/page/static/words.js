// What is said of a device, and how values are written. All text goes into the page by textContent: it is never markup.

export const WORDS = {
  b: "busy", i: "idle", h: "held", f: "free", x: "failing", s: "silent",
};
export const MEANINGS = {
  b: "held, and works", i: "held, and has done nothing for 10 s", h: "held; whether it works is not known",
  f: "held by nobody", x: "does not answer", s: "its node has said nothing for 30 s",
};

const GIB = 1024 ** 3;
const UNITS = {
  ratio: (v) => `${round(v * 100)} %`,
  bytes: (v) => `${round(v / GIB)} GiB`,
  bytes_per_second: (v) => `${round(v / 1024 ** 2)} MiB/s`,
  watts: (v) => `${round(v)} W`,
  celsius: (v) => `${round(v)} °C`,
  hertz: (v) => `${round(v / 1e6)} MHz`,
  joules: (v) => `${round(v / 1e6)} MJ`,
  seconds: (v) => `${round(v)} s`,
};

function round(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : 2 });
}

export function written(value, unit) {
  if (value === null || value === undefined) return "not known";
  return (UNITS[unit] ?? round)(value);
}

export function time(ms, seconds = true) {
  return new Date(ms).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(seconds && { second: "2-digit" }) });
}

export function lasted(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 100) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

export function metricName(key) {
  return key.replace(/_(ratio|bytes|watts|celsius|hz|joules_total|total|bytes_per_second|seconds_total)$/, "").replaceAll("_", " ");
}

// An element with text and children; a string among the children is text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The sign of a word: its colour and its mark, as tiles have them.
export function sign(word) {
  const svg = drawn("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" });
  svg.append(drawn("rect", { x: 0.5, y: 0.5, width: 13, height: 13, rx: 2, class: `w-${word}` }));
  if (word === "i") svg.append(drawn("rect", { x: 4, y: 4, width: 6, height: 6, class: "m-i" }));
  if (word === "h") svg.append(drawn("circle", { cx: 7, cy: 7, r: 2, class: "m-h" }));
  if (word === "x") svg.append(drawn("path", { d: "M3.5 3.5l7 7M10.5 3.5l-7 7", class: "m-x" }));
  return svg;
}

// Two parts of a whole as a bar.
export function bar(parts) {
  const svg = drawn("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(drawn("rect", { width: 100, height: 1, class: "track" }));
  let from = 0;
  for (const [word, percent] of parts) {
    if (percent > 0) svg.append(drawn("rect", { x: from, width: percent, height: 1, class: `w-${word}` }));
    from += percent;
  }
  return svg;
}

export function who(holders) {
  return holders.map(([namespace, pod]) => (namespace ? `${namespace}/${pod}` : pod)).join(", ");
}
