// The map: groups of tiles on a canvas that is as large as what is seen of it. Only the groups in sight are drawn.

import { MEANINGS, WORDS } from "./words.js";

const GAP = 10;
const LABEL = 17;
const SMALLEST = 4;
const LARGEST = 44;
const SHADES = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]; // cividis

export function shade(share) {
  return SHADES[Math.max(0, Math.min(SHADES.length - 1, Math.floor(share * SHADES.length)))];
}

export class FleetMap {
  // cells: lists of devices that share a GPU's tile. events: {shown(device), over(device, x, y), said(device)}
  constructor(canvas, scroller, spacer, events) {
    Object.assign(this, { canvas, scroller, spacer, events, groups: [], zoom: 1, cursor: null, chosen: null });
    this.context = canvas.getContext("2d", { alpha: false });
    this.paint = null;
    this.short = String;
    this.only = null;
    this.alerted = new Set();
    new ResizeObserver(() => this.lay()).observe(scroller);
    scroller.addEventListener("scroll", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.pointed(event));
    canvas.addEventListener("pointerleave", () => events.over(null));
    canvas.addEventListener("click", (event) => {
      const device = this.at(event.offsetX, event.offsetY);
      if (device) { this.cursor = device; events.shown(device); }
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => { events.over(null); this.draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    this.restyle();
  }

  restyle() {
    const probe = document.createElement("span");
    this.scroller.append(probe);
    this.colours = {};
    for (const name of ["panel", "text", "faint", "line", "busy", "held", "idle", "free", "failing", "mark", "focus"]) {
      probe.style.color = `var(--${name})`;
      this.colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.draw();
  }

  show(groups, labelled) {
    this.groups = groups;
    this.labelled = labelled;
    this.lay();
  }

  zoomBy(factor) {
    this.zoom = Math.max(0.25, Math.min(8, this.zoom * factor));
    this.lay();
  }

  // Where each group goes, with tiles as large as fit, times the zoom.
  lay() {
    const { clientWidth: width, clientHeight: height } = this.scroller;
    if (!width || !height) return;
    let [low, high] = [SMALLEST, LARGEST];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.place(middle, width, false) <= height) low = middle;
      else high = middle - 1;
    }
    this.tile = Math.max(3, Math.min(88, Math.round(low * this.zoom)));
    const total = this.place(this.tile, width, true);
    this.spacer.style.height = `${Math.max(0, total - height)}px`;
    const scale = devicePixelRatio || 1;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.scale = scale;
    this.draw();
  }

  place(tile, width, keep) {
    const step = tile + (tile > 6 ? 2 : 1);
    const label = this.labelled || tile >= 12 ? LABEL : 0;
    const most = Math.max(1, Math.floor(width / step));
    const gap = tile >= 12 ? GAP : Math.max(3, tile >> 1);
    const few = this.labelled && this.groups.length <= 40; // each may be as wide as the map
    let [x, y, row] = [0, 0, 0];
    for (const group of this.groups) {
      const count = group.cells.length;
      const columns = Math.min(most, few || count > 64 ? count : Math.min(count, 16));
      const wide = Math.max(columns * step, label ? Math.min(width, 84) : 0);
      const high = label + Math.ceil(count / columns) * step;
      if (x && x + wide > width) { x = 0; y += row + gap; row = 0; }
      if (keep) Object.assign(group, { x, y, wide, high, columns, label });
      row = Math.max(row, high);
      x += wide + gap;
    }
    if (keep) this.step = step;
    return y + row;
  }

  draw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.drawNow(); });
  }

  drawNow() {
    const started = performance.now();
    const { context, colours, tile, step } = this;
    const [top, height] = [this.scroller.scrollTop, this.scroller.clientHeight];
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, this.scroller.clientWidth, height);
    const strokes = new Map(); // by colour: rectangles
    const marks = [];
    for (const group of this.groups) {
      if (group.y + group.high < top || group.y > top + height) continue;
      if (group.label) this.label(group, top);
      group.cells.forEach((cell, place) => {
        const x = group.x + (place % group.columns) * step;
        const y = group.y - top + group.label + Math.floor(place / group.columns) * step;
        const part = tile / cell.length;
        cell.forEach((device, number) => {
          const colour = this.colour(device);
          if (!strokes.has(colour)) strokes.set(colour, []);
          const left = x + number * part;
          const wide = Math.max(1, cell.length > 1 && number < cell.length - 1 && part > 3 ? part - 1 : part);
          strokes.get(colour).push(left, y, wide);
          if (tile >= 8 || device === this.cursor || device === this.chosen) marks.push([device, left, y, wide]);
        });
      });
    }
    for (const [colour, places] of strokes) {
      context.fillStyle = colour;
      for (let i = 0; i < places.length; i += 3) context.fillRect(places[i], places[i + 1], places[i + 2], tile);
    }
    for (const mark of marks) this.mark(...mark);
    context.globalAlpha = 1;
    document.body.dataset.drawMs = (performance.now() - started).toFixed(1);
  }

  label(group, top) {
    const { context } = this;
    context.globalAlpha = 1;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillStyle = this.colours.faint;
    let text = group.name;
    const room = group.wide + 4;
    if (context.measureText(text).width > room) {
      let [from, to] = [0, text.length];
      while (from < to) {
        const middle = (from + to + 1) >> 1;
        if (context.measureText(text.slice(0, middle) + "…").width <= room) from = middle;
        else to = middle - 1;
      }
      text = `${text.slice(0, from)}…`;
    }
    context.fillText(text, group.x, group.y - top + 12);
  }

  isDimmed(device) {
    return this.only !== null && device.word !== this.only;
  }

  colour(device) {
    if (this.isDimmed(device)) return this.colours.line;
    if (this.paint) {
      const share = this.paint(device);
      return share === null ? this.colours.free : shade(share);
    }
    return device.word === "s" ? this.colours.panel : this.colours[WORDS[device.word]] ?? this.colours.held;
  }

  mark(device, x, y, wide) {
    const { context, colours, tile } = this;
    const middle = [x + wide / 2, y + tile / 2];
    if (!this.isDimmed(device) && wide >= 6) {
      if (!this.paint && device.word === "i") {
        const inner = Math.max(2, tile * 0.36);
        context.fillStyle = colours.panel;
        context.fillRect(middle[0] - Math.min(inner, wide * 0.5) / 2, middle[1] - inner / 2, Math.min(inner, wide * 0.5), inner);
      } else if (!this.paint && device.word === "h") {
        context.fillStyle = colours.text;
        context.beginPath(); context.arc(...middle, Math.max(1.2, tile * 0.1), 0, 7); context.fill();
      } else if (device.word === "x") {
        context.strokeStyle = colours.mark;
        context.lineWidth = Math.max(1.5, tile / 11);
        const arm = Math.min(wide, tile) * 0.24;
        context.beginPath();
        context.moveTo(middle[0] - arm, middle[1] - arm); context.lineTo(middle[0] + arm, middle[1] + arm);
        context.moveTo(middle[0] + arm, middle[1] - arm); context.lineTo(middle[0] - arm, middle[1] + arm);
        context.stroke();
      }
    }
    if (device.word === "s") {
      context.strokeStyle = colours.faint;
      context.lineWidth = 1;
      context.setLineDash([2, 2]);
      context.strokeRect(x + 0.5, y + 0.5, wide - 1, tile - 1);
      context.setLineDash([]);
    }
    if (this.paint && device.value !== null && wide >= 30 && !this.isDimmed(device)) {
      context.fillStyle = this.paint(device) > 0.55 ? "#111" : "#fff";
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(this.short(device.value), ...middle, wide - 2);
    }
    if ((this.alerted.has(device.uuid) || this.alerted.has(device.parent)) && wide >= 6) {
      const size = Math.max(4, tile * 0.3);
      context.fillStyle = colours.text;
      context.beginPath();
      context.moveTo(x + wide, y); context.lineTo(x + wide, y + size); context.lineTo(x + wide - size, y);
      context.fill();
    }
    const focused = device === this.cursor && document.activeElement === this.canvas;
    if (focused || device === this.chosen) {
      context.strokeStyle = colours.focus;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, wide + 2, tile + 2);
    }
  }

  at(x, y) {
    const deep = y + this.scroller.scrollTop;
    for (const group of this.groups) {
      if (x < group.x || deep < group.y + group.label || x >= group.x + group.columns * this.step || deep >= group.y + group.high) continue;
      const column = Math.floor((x - group.x) / this.step);
      const row = Math.floor((deep - group.y - group.label) / this.step);
      const cell = group.cells[row * group.columns + column];
      if (!cell) return null;
      const inside = x - group.x - column * this.step;
      return cell[Math.min(cell.length - 1, Math.floor((inside / this.tile) * cell.length))];
    }
    return null;
  }

  pointed(event) {
    const device = this.at(event.offsetX, event.offsetY);
    this.canvas.style.cursor = device ? "pointer" : "default";
    this.events.over(device, event.clientX, event.clientY);
  }

  // All devices in the order of the map, each with the place of its tile.
  order() {
    const found = [];
    for (const group of this.groups) {
      group.cells.forEach((cell, place) => cell.forEach((device, number) => found.push({
        device, group,
        x: group.x + (place % group.columns) * this.step + (number * this.tile) / cell.length,
        y: group.y + group.label + Math.floor(place / group.columns) * this.step,
      })));
    }
    return found;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const order = this.order();
    if (!order.length) return;
    const here = order.findIndex((one) => one.device === this.cursor);
    const next = {
      ArrowRight: () => Math.min(order.length - 1, here + 1),
      ArrowLeft: () => Math.max(0, here - 1),
      ArrowDown: () => below(order, Math.max(0, here), 1),
      ArrowUp: () => below(order, Math.max(0, here), -1),
      Home: () => 0,
      End: () => order.length - 1,
    }[event.key];
    if (next) {
      event.preventDefault();
      this.move(order[next()]);
    } else if ((event.key === "Enter" || event.key === " ") && here >= 0) {
      event.preventDefault();
      this.events.shown(this.cursor);
    }
  }

  move(place) {
    this.cursor = place.device;
    const { scroller, tile } = this;
    if (place.y < scroller.scrollTop) scroller.scrollTop = Math.max(0, place.y - LABEL);
    else if (place.y + tile > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = place.y + tile + 4 - scroller.clientHeight;
    this.draw();
    const box = this.canvas.getBoundingClientRect();
    this.events.over(place.device, box.left + place.x + tile / 2, box.top + place.y - scroller.scrollTop + tile / 2);
    this.events.said(place.device);
  }
}

// The nearest tile of the next row down or up.
function below(order, here, way) {
  const { x, y } = order[here];
  let best = here;
  let row = null;
  for (let i = here + way; i >= 0 && i < order.length; i += way) {
    if ((order[i].y - y) * way <= 0) continue;
    if (row === null || (order[i].y - row) * way < 0) { row = order[i].y; best = i; }
    if (order[i].y === row && Math.abs(order[i].x - x) < Math.abs(order[best].x - x)) best = i;
    if ((order[i].y - y) * way > 600) break;
  }
  return best;
}

export function described(device) {
  return `${WORDS[device.word]}: ${MEANINGS[device.word]}`;
}
