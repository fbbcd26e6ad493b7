"use strict";
/* Functions shared by all pages: the dry run's page and the out-of-memory page. */
const GIB = 2 ** 30, MIB = 2 ** 20;

function size(number) {
  if (number == null) return "unknown";
  const of = Math.abs(number), sign = number < 0 ? "-" : "";
  if (of >= GIB) return sign + (of / GIB).toFixed(2) + " GiB";
  if (of >= MIB) return sign + Math.round(of / MIB) + " MiB";
  return sign + (of >= 1024 ? Math.floor(of / 1024) + " KiB" : of + " B");
}

function put(parent, name, text, kind) {
  const element = document.createElement(name);
  if (text != null) element.textContent = text;
  if (kind) element.className = kind;
  parent.append(element);
  return element;
}

function section(title) {
  const whole = put(document.querySelector("main"), "section");
  put(whole, "h2", title);
  return whole;
}

/* A column whose name ends with a space holds numbers. A cell is a string, an element (a bar),
   {code}, or {text, kind}. */
function table(parent, heads, rows) {
  const whole = put(parent, "table");
  const head = put(put(whole, "thead"), "tr");
  for (const name of heads) put(head, "th", name.trim(), name.endsWith(" ") ? "number" : "");
  const body = put(whole, "tbody");
  for (const row of rows) {
    const line = put(body, "tr");
    row.forEach((cell, at) => {
      const place = put(line, "td", null, heads[at].endsWith(" ") ? "number" : "");
      if (heads[at].trim()) place.dataset.head = heads[at].trim();
      if (cell instanceof Node) { place.className = "bar"; place.append(cell); }
      else if (cell && cell.code) put(place, "code", cell.code);
      else if (cell && cell.kind) { place.className = cell.kind; place.textContent = cell.text; }
      else place.textContent = cell;
    });
  }
}

/* A stacked bar. Parts are {name, colour, bytes}; each is as wide as its share of `most`. */
function stack(parts, most) {
  const bar = document.createElement("div");
  bar.className = "stack";
  for (const { name, colour, bytes } of parts.filter(part => part.bytes > 0)) {
    const piece = put(bar, "i");
    piece.style.background = `var(${colour})`;
    piece.style.width = 100 * bytes / most + "%";
    piece.title = `${name}: ${size(bytes)}`;
  }
  return bar;
}

function swatch(parent, colour, letter, kind = "") {
  const mark = put(parent, "i", null, "swatch " + kind);
  if (colour) mark.style.backgroundColor = `var(${colour})`;
  if (letter) put(mark, "b", letter);
  return mark;
}

/* A legend. Entries are {name, colour, letter, kind, note}. */
function key(parent, entries) {
  const whole = put(parent, "div", null, "key");
  for (const { name, colour, letter, kind, note } of entries) {
    const entry = put(whole, "span");
    swatch(entry, colour, letter, kind);
    put(entry, "span", note ? `${name} ${note}` : name);
  }
}

function shape(parent, name, attributes) {
  const element = document.createElementNS("http:" + "//www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

/* A stacked area chart. `layers` are {name, colour, letter, values}, with a value for each part of
   the x axis; `edges` are the bounds of the parts, from 0 to 1 (default: equally wide); `rest` are
   the heights up to which a hatched layer fills the top; `line` is drawn dashed; `marks` are
   {at, text}; `say(part)` returns the text shown below the chart for the part under the pointer, and
   for the last part before that, unless `isQuiet`. */
function layered(parent, { title, layers, edges, rest, line, marks, say, isQuiet }) {
  const count = layers[0].values.length, width = 1000, height = 230, foot = 16;
  const at = edges || Array.from({ length: count + 1 }, (_, number) => number / count);
  const sums = Array.from({ length: count }, (_, part) =>
    layers.reduce((sum, layer) => sum + layer.values[part], 0));
  const tops = rest ? sums.map((sum, part) => Math.max(sum, rest[part])) : sums;
  const most = Math.max(...tops, ...(line || []), 1);
  const y = bytes => (height - foot) * (1 - bytes / (most * 1.06));
  const x = part => at[part] * width;
  const chart = put(parent, "div", null, "chart");
  const picture = shape(chart, "svg", { viewBox: `0 0 ${width} ${height}`,
    preserveAspectRatio: "none", role: "img" });
  shape(picture, "title", {}).textContent = title;
  const along = values => values.flatMap((to, part) =>
    [`${x(part)},${y(to)}`, `${x(part + 1)},${y(to)}`]);
  const area = (below, above, style) => shape(picture, "polygon", { style,
    points: [...along(above), ...along(below).reverse()].join(" ") });
  const letters = [];
  let below = new Array(count).fill(0);
  for (const { colour, letter, values } of layers) {
    const above = below.map((from, part) => from + values[part]);
    if (values.some(value => value > 0)) {
      area(below, above, `fill: var(${colour})`);
      // The letter goes where the layer is thickest; among equals, the last.
      let best = 0;
      values.forEach((value, part) => { if (value >= values[best]) best = part; });
      if (letter && values[best] > most / 16)
        letters.push([(at[best] + at[best + 1]) / 2, y(below[best] + values[best] / 2), letter]);
    }
    below = above;
  }
  if (rest && tops.some((top, part) => top > below[part])) {
    const pattern = shape(shape(picture, "defs", {}), "pattern", { id: "hatch", width: 5, height: 5,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    shape(pattern, "rect", { width: 5, height: 5, style: "fill: var(--freed)" });
    shape(pattern, "rect", { width: 1, height: 5, style: "fill: var(--soft); opacity: 0.5" });
    area(below, tops, "fill: url" + "(#hatch)");
  }
  const drawn = (values, dashes) => shape(picture, "polyline", { points: along(values).join(" "),
    style: `fill: none; stroke: var(--ink); vector-effect: non-scaling-stroke; ${dashes}` });
  if (rest) drawn(tops, "stroke-width: 1.2");
  if (line) drawn(line, "stroke-dasharray: 5 3; stroke: var(--soft)");
  for (const { at: place, text } of marks) {
    shape(picture, "line", { x1: place * width, x2: place * width, y1: 0, y2: height - foot,
      style: "stroke: var(--soft); stroke-dasharray: 3 3; vector-effect: non-scaling-stroke" });
    const note = put(chart, "span", text, "mark");
    // Text that would be cut off on a 320-pixel phone goes on the other side of its mark.
    if ((1 - place) * 320 < 7 * text.length + 6) note.style.right = 100 * (1 - place) + "%";
    else note.style.left = 100 * place + "%";
  }
  for (const [place, top, letter] of letters) {
    const note = put(chart, "span", letter, "letter");
    note.style.left = `clamp(0px, calc(${100 * place}% - 6px), calc(100% - 13px))`;
    note.style.top = top - 6 + "px";
  }
  const peak = put(chart, "span", size(most), "amount");
  peak.style.top = Math.max(0, y(most) - 2) + "px";
  if (!say) return;
  const rule = put(chart, "span", null, "hover"), words = put(parent, "output", isQuiet ? "" : say(count - 1));
  rule.hidden = true;
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), place = (event.clientX - box.left) / box.width;
    let part = 0;
    while (part < count - 1 && at[part + 1] < place) part++;
    rule.hidden = false;
    rule.style.left = 100 * place + "%";
    words.textContent = say(part);
  });
}

/* The button that switches between light and dark; the browser's setting is the default. */
function listenToTheme(changed) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    changed?.();
  });
  dark.addEventListener("change", () => changed?.());
}

/* A colour of the style sheet as the three numbers that a canvas takes. */
function colourOf(name) {
  const probe = put(document.body, "i");
  probe.style.color = `var(${name})`;
  const numbers = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return numbers;
}
