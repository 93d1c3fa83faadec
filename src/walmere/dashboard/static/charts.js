// Two small line charts, drawn as SVG. Time runs to the right; the newest point is at the right edge.

import { clock } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 20;
const GAP_SECONDS = 25; // no line across a longer time without a reading

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// The next "round" number: 1, 2 or 5 times a power of ten.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

// A time before now, on the axis.
function ago(seconds) {
  return seconds < 60 ? `${Math.round(seconds)} s` : `${+(seconds / 60).toFixed(1)} min`;
}

export class Chart {
  // series: [{ name, index, area }], index: of the value in a point; smallest: the top of the axis is at least this
  constructor(figure, series, { format, smallest }) {
    Object.assign(this, { figure, series, format, smallest, points: [], seconds: 300, at: null });
    this.svg = element("svg", { role: "img" }, figure);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    figure.append(this.tip);
    figure.addEventListener("pointermove", (event) => this.hover(event));
    figure.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  show(points, seconds) {
    this.points = points;
    this.seconds = seconds;
    this.draw();
  }

  hover(event) {
    this.at = event.clientX - this.figure.getBoundingClientRect().left;
    this.draw();
  }

  draw() {
    const width = this.figure.clientWidth;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    const end = this.points.length ? this.points.at(-1)[0] : Date.now() / 1000;
    const begin = end - this.seconds;
    const shown = this.points.filter((point) => point[0] >= begin - 2);
    const values = this.series.flatMap((each) => shown.map((point) => point[each.index] ?? 0));
    const top = ceiling(Math.max(this.smallest, ...values) * 1.05);
    const x = (time) => LEFT + ((time - begin) / this.seconds) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    this.axes(width, top, y);
    for (const each of this.series) this.line(each, shown, x, y);
    this.cross(shown, x, y, width);
  }

  axes(width, top, y) {
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      element("line", { class: share ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }, this.svg);
      element("text", { class: "label", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, this.svg, this.format(top * share));
    }
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const at = LEFT + share * (width - LEFT - RIGHT);
      const text = share === 1 ? "now" : `−${ago(this.seconds * (1 - share))}`;
      element("text", { class: "label", x: at, y: HEIGHT - 4, "text-anchor": anchor }, this.svg, text);
    }
  }

  line(series, points, x, y) {
    const runs = [];
    let before = null;
    for (const point of points) {
      const value = point[series.index];
      const known = value !== null && value !== undefined;
      if (known && (before === null || point[0] - before > GAP_SECONDS)) runs.push([]);
      if (known) runs.at(-1).push(`${x(point[0]).toFixed(1)} ${y(value).toFixed(1)}`);
      before = known ? point[0] : null;
    }
    const path = runs.map((run) => `M${run.join("L")}`).join("");
    const base = y(0).toFixed(1);
    const area = runs.map((run) => `M${run[0].split(" ")[0]} ${base}L${run.join("L")}L${run.at(-1).split(" ")[0]} ${base}Z`).join("");
    if (series.area) element("path", { class: `area ${series.name}`, d: area }, this.svg);
    element("path", { class: `line ${series.name}`, d: path }, this.svg);
  }

  cross(points, x, y, width) {
    this.tip.hidden = this.at === null || !points.length;
    if (this.tip.hidden) return;
    const point = points.reduce((best, each) => (Math.abs(x(each[0]) - this.at) < Math.abs(x(best[0]) - this.at) ? each : best));
    const at = x(point[0]);
    element("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, this.svg);
    const texts = [clock(point[0])];
    for (const each of this.series) {
      const value = point[each.index];
      if (value === null || value === undefined) continue;
      element("circle", { class: `dot ${each.name}`, cx: at, cy: y(value), r: 3 }, this.svg);
      texts.push(`${each.label} ${this.format(value)}`);
    }
    this.tip.textContent = texts.join("  ·  ");
    this.tip.style.left = `${Math.min(Math.max(at, 80), width - 80)}px`;
  }
}
