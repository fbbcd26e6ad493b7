"use strict";
// Draws the layout of a device's memory out of the columns that `gruyere map --html` embedded (html.rs writes them).
//
// All that is mapped is one row of bytes, the *line*: range behind range, by address. A stroke (a block, or a piece of free memory of one kind) is an interval
// of it. A *view* is an order in which parts of the line are shown: by address it is the line itself, by physical page it jumps through it. The canvas
// shows a view in rows of a power of two of bytes; each column of a row adds up the bytes of each colour in it, and is filled from below in that
// proportion. So a column is right at any zoom, whether it is a part of one block or all of ten thousand. Rows are drawn once and kept.

// What strokes show; the numbers are those of strokes.rs.
const LIVE = 0, PENDING = 1, WHOLE = 2, BOUND = 3, GAP = 4, SLOTS = 5, REST = 6, TAIL = 7, SPARE = 8;
const INK_NAMES = ["live block", "pending block (waits for streams)", "free, whole pages", "free, whole pages that stay",
  "free, in a partly used page", "free slots of a slab", "rest of a slot", "tail of a slab", "spare pages, mapped nowhere"];
const LIFETIMES = ["auto", "transient", "step", "persistent"];
const NOBODY = 0xffffffff;
const PAGE = 2 * 1024 * 1024;

// Bins: what a column of a row adds up. First the classes of live blocks, then the rest, in the order they are stacked from below.
const CLASSES = 8, B_PENDING = 8, B_SLOTS = 9, B_GAP = 10, B_BOUND = 11, B_WHOLE = 12, B_SPARE = 13, BINS = 14;
const BIN_OF_INK = [0, B_PENDING, B_WHOLE, B_BOUND, B_GAP, B_SLOTS, B_SLOTS, B_SLOTS, B_SPARE];
const AGES = [[0, "this step"], [1, "1 step"], [3, "2-3 steps"], [15, "4-15 steps"], [255, "16-255 steps"], [Infinity, "older"]];
const SIZES = [[4096, "to 4 KiB"], [65536, "to 64 KiB"], [1 << 20, "to 1 MiB"], [16 << 20, "to 16 MiB"], [256 << 20, "to 256 MiB"], [Infinity, "larger"]];

const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);

// ---------------------------------------------------------------------------------------------------- numbers for people

function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
  return (unit === 0 || Number.isInteger(n) ? n : n.toFixed(2)) + " " + units[unit];
}
const exact = (n) => n < 1024 ? n + " B" : bytesText(n) + " (" + n.toLocaleString("en") + " B)";
const share = (part, whole) => whole > 0 ? (100 * part / whole).toFixed(1) + "%" : "-";
const hex = (big) => "0x" + big.toString(16);

// ---------------------------------------------------------------------------------------------------- the data

/** The embedded columns as typed arrays, by name. */
async function readColumns() {
  const text = $("columns").textContent;
  const packed = atob(text);
  $("columns").remove();
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const buffer = await new Response(stream).arrayBuffer();
  const columns = {};
  let at = 0;
  for (const { name, count } of facts.columns) {
    columns[name] = new Uint32Array(buffer, at, count);
    at += 4 * count;
  }
  return columns;
}

let columns;        // as embedded
let starts;         // where each stroke begins on the line, and behind the last one the line's end
let ranges;         // { address (BigInt), start, end (on the line), first, last (strokes), kind, lifetime, capture }
let rangeStarts;    // their starts
let views = {};     // "address", "physical": { total, at, line, length, notch }

/** The last index whose value is at most `value`; -1 where there is none. `sorted` has `count` values. */
function indexAt(sorted, value, count = sorted.length) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function arrange() {
  const { lengths, rangeLow, rangeHigh, rangeStrokes, rangeFacts } = columns;
  starts = new Float64Array(lengths.length + 1);
  let at = 0;
  for (let i = 0; i < lengths.length; i++) { starts[i] = at; at += lengths[i] * facts.unit; }
  starts[lengths.length] = at;
  ranges = [];
  let first = 0;
  for (let r = 0; r < rangeLow.length; r++) {
    const last = first + rangeStrokes[r];
    const address = (BigInt(rangeHigh[r]) << 32n) | BigInt(rangeLow[r]);
    const fact = rangeFacts[r];
    ranges.push({ address, start: starts[first], end: starts[last], first, last, kind: fact & 255, lifetime: fact >> 8 & 255, capture: fact >> 16 & 255 });
    first = last;
  }
  rangeStarts = Float64Array.from(ranges, (range) => range.start);
  views.address = viewOf(ranges.map((range) => [range.start, range.end - range.start, null]));
  views.physical = viewOf(physicalOrder());
}

/** Pages by chunk and number, neighbours joined; those of spans behind them. Parts are [line or -1, bytes, label]. */
function physicalOrder() {
  const { pageChunk, pageNumber, pageBytes } = columns;
  const line = new Float64Array(pageChunk.length);
  let at = 0;
  for (let p = 0; p < line.length; p++) {
    line[p] = p < facts.mapped_pages ? at : -1;
    if (p < facts.mapped_pages) at += pageBytes[p];
  }
  const order = Array.from(line.keys());
  order.sort((a, b) => pageChunk[a] - pageChunk[b] || (pageChunk[a] === NOBODY ? a - b : pageNumber[a] - pageNumber[b]));
  const parts = [];
  let chunk = -1;
  for (const p of order) {
    const last = parts[parts.length - 1];
    const goesOn = last && chunk === pageChunk[p] &&
      (line[p] < 0 ? last[0] < 0 : last[0] >= 0 && last[0] + last[1] === line[p]);
    if (goesOn) last[1] += pageBytes[p];
    else parts.push([line[p], pageBytes[p], pageChunk[p] === NOBODY ? null : { chunk: pageChunk[p], page: pageNumber[p] }]);
    chunk = pageChunk[p];
  }
  return parts;
}

function viewOf(parts) {
  const view = { at: new Float64Array(parts.length), line: new Float64Array(parts.length), length: new Float64Array(parts.length), label: [], total: 0 };
  parts.forEach(([line, length, label], i) => {
    view.at[i] = view.total;
    view.line[i] = line;
    view.length[i] = length;
    view.label.push(label);
    view.total += length;
  });
  return view;
}

/** What is known of a stroke. */
function strokeFacts(i) {
  const [ink, lifetime, capture, stream, slot] = facts.kinds[columns.kinds[i]];
  const range = ranges[indexAt(rangeStarts, starts[i])];
  const bytes = starts[i + 1] - starts[i];
  const block = ink === LIVE || ink === PENDING;
  return {
    i, ink, lifetime, capture, stream, slot, range, bytes, block,
    address: range.address + BigInt(starts[i] - range.start),
    requested: block ? Math.max(0, bytes - columns.slack[i]) : 0,
    step: columns.steps[i],
    age: Math.max(0, facts.step - columns.steps[i]),
  };
}

/** Which chunk and page is behind a place on the line, as text. */
function pageText(line) {
  const { pageChunk, pageNumber, pageBytes } = columns;
  pageText.starts ??= (() => {
    const list = new Float64Array(facts.mapped_pages);
    let at = 0;
    for (let p = 0; p < list.length; p++) { list[p] = at; at += pageBytes[p]; }
    return list;
  })();
  const p = indexAt(pageText.starts, line);
  return p < 0 ? "-" : pageChunk[p] === NOBODY ? "page " + pageNumber[p] + " of its range" : "chunk " + pageChunk[p] + ", page " + pageNumber[p];
}

// ---------------------------------------------------------------------------------------------------- classes and colours

let by = "lifetime";
let highlighted = -1;      // the bin that the legend singles out
let classOfKind;           // by kind: the class where it follows from the kind alone, else 255
let palette;               // by bin: [r, g, b]
let packedPalette;         // by bin: as the canvas stores it
let separator;

const classNames = () => ({
  lifetime: LIFETIMES,
  age: AGES.map((age) => age[1]),
  size: SIZES.map((size) => size[1]),
  stream: streamNames(),
})[by];

/** The streams there are, the most common seven by their numbers, and the others. */
let streamClass = new Map();
function streamNames() {
  const sums = new Map();
  const { lengths, kinds } = columns;
  for (let i = 0; i < lengths.length; i++) {
    const kind = facts.kinds[kinds[i]];
    if (kind[0] === LIVE) sums.set(kind[3], (sums.get(kind[3]) || 0) + lengths[i]);
  }
  const order = [...sums].sort((a, b) => b[1] - a[1]).map((entry) => entry[0]);
  streamClass = new Map(order.slice(0, order.length > CLASSES ? CLASSES - 1 : CLASSES).map((stream, n) => [stream, n]));
  const names = [...streamClass.keys()].map((stream) => "stream " + stream);
  return order.length > CLASSES ? [...names, "other streams"] : names;
}

function classOf(i) {
  const known = classOfKind[columns.kinds[i]];
  if (known !== 255) return known;
  const list = by === "age" ? AGES : SIZES;
  const value = by === "age" ? facts.step - columns.steps[i] : columns.lengths[i] * facts.unit;
  let n = 0;
  while (value > list[n][0]) n++;
  return n;
}

const binOf = (i) => {
  const ink = facts.kinds[columns.kinds[i]][0];
  return ink === LIVE ? classOf(i) : BIN_OF_INK[ink];
};
let bins;                  // by stroke, for the colours chosen now

function classify() {
  if (by === "stream") streamNames();
  classOfKind = Uint8Array.from(facts.kinds, (kind) =>
    by === "lifetime" ? kind[1] % LIFETIMES.length : by === "stream" ? streamClass.get(kind[3]) ?? CLASSES - 1 : 255);
  bins ??= new Uint8Array(columns.lengths.length);
  for (let i = 0; i < bins.length; i++) bins[i] = binOf(i);
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => {
    const text = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  };
  const kind = by === "lifetime" ? "--lifetime-" : "--ramp-";
  const count = by === "lifetime" ? 4 : 6;
  palette = [];
  for (let n = 0; n < CLASSES; n++) palette.push(read(kind + n % count));
  for (const name of ["--pending", "--slots", "--gap", "--bound", "--whole", "--spare"]) palette.push(read(name));
  const paper = read("--paper");
  separator = paper;
  const faded = (colour) => colour.map((part, n) => Math.round(part * 0.18 + paper[n] * 0.82));
  const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  packedPalette = Uint32Array.from(palette, (colour, bin) =>
    pack(highlighted < 0 || bin === highlighted || bin === B_WHOLE ? colour : faded(colour)));
  rows.clear();
}

// ---------------------------------------------------------------------------------------------------- the canvas of rows

const GUTTER = 118, STRIP = 18, SPACE = 6, LEAST_PITCH = 19, MOST_PITCH = 46, LEAST_ROW = 8192;
let pitch = LEAST_PITCH;                   // from row to row, in CSS pixels: a row and the space below it
let view = "address";
let width = 0, height = 0, scale = 1;      // of the stage, in CSS pixels, and device pixels in each
let rowBytes = 1 << 30, top_ = 0;          // bytes a row, and the byte of the view that is at the top (a multiple of rowBytes)
let selected = -1;
const rows = new Map();                    // drawn rows, by their first byte

const total = () => views[view].total;
const columnsWide = () => Math.max(16, Math.floor((width - GUTTER - STRIP - 8) * scale));
const visibleRows = () => Math.max(1, Math.floor(height / pitch));
const rowHigh = () => pitch - SPACE;

/** Few rows are drawn taller, so that the stage is used. */
function setPitch() {
  pitch = Math.max(LEAST_PITCH, Math.min(MOST_PITCH, Math.floor(height / Math.max(1, Math.ceil(total() / rowBytes)))));
}

/** Calls `paint(from, to, bin)` for the parts of the view between two of its bytes, in order; `from` and `to` are bytes of the view. */
function walk(from, to, paint) {
  const v = views[view];
  let part = Math.max(0, indexAt(v.at, from));
  for (; part < v.at.length && v.at[part] < to; part++) {
    const begin = Math.max(from, v.at[part]), end = Math.min(to, v.at[part] + v.length[part]);
    if (begin >= end) continue;
    if (v.line[part] < 0) { paint(begin, end, B_SPARE, -1, part); continue; }
    const shift = v.at[part] - v.line[part];
    let i = indexAt(starts, begin - shift, starts.length - 1);
    for (let at = begin; at < end; i++) {
      const stop = Math.min(end, starts[i + 1] + shift);
      paint(at, stop, bins[i], i, part);
      at = stop;
    }
  }
}

/** One row, drawn: its blocks, and below them a line where memory is lost, so that not a single gap is overlooked. */
function drawRow(from) {
  const wide = columnsWide(), high = Math.round(rowHigh() * scale);
  const sums = new Float32Array(wide * BINS);
  const borders = [], notches = [];
  const perColumn = rowBytes / wide;
  let lastPart = -1, before = -1;
  walk(from, Math.min(from + rowBytes, total()), (begin, end, bin, i, part) => {
    const a = (begin - from) / perColumn, b = (end - from) / perColumn;
    let column = Math.floor(a);
    const last = Math.min(wide - 1, Math.ceil(b) - 1);
    if (column >= last) sums[Math.min(column, wide - 1) * BINS + bin] += b - a;
    else {
      sums[column * BINS + bin] += column + 1 - a;
      for (column++; column < last; column++) sums[column * BINS + bin] = 1;
      sums[last * BINS + bin] += b - last;
    }
    if (part !== lastPart) {
      if (lastPart >= 0 && view === "address") notches.push(Math.floor(a));
    } else if (i > before && bin <= B_PENDING && b - a > 4 * scale) borders.push(Math.floor(a));
    [lastPart, before] = [part, i];
  });
  const image = new ImageData(wide, Math.round(pitch * scale));
  const pixels = new Uint32Array(image.data.buffer);
  for (let column = 0; column < wide; column++) {
    const at = column * BINS;
    let sum = 0;
    for (let bin = 0; bin < BINS; bin++) sum += sums[at + bin];
    if (sum <= 0) continue;
    // From below; what is there at all, and more than a trace, gets a pixel.
    let filled = 0, bottom = high, only = -1;
    for (let bin = 0; bin < BINS; bin++) {
      const part = sums[at + bin];
      if (part <= 0) continue;
      only = bin;
      filled += part;
      let up = Math.round(high * (1 - filled / sum));
      if (up >= bottom && part > 0.004 * sum && bottom > 0) up = bottom - 1;
      for (let y = up; y < bottom; y++) pixels[y * wide + column] = packedPalette[bin];
      bottom = Math.min(bottom, up);
    }
    for (let y = 0; y < bottom; y++) pixels[y * wide + column] = packedPalette[only];
  }
  // A block's border is a shade of its own colour.
  for (const column of borders)
    for (let y = 0; y < high; y++) {
      const at = y * wide + column, colour = pixels[at];
      const mixed = [0, 8, 16].map((bits, n) => Math.round((colour >>> bits & 255) * 0.62 + separator[n] * 0.38));
      pixels[at] = (255 << 24 | mixed[2] << 16 | mixed[1] << 8 | mixed[0]) >>> 0;
    }
  // Where the address jumps, a notch: not so many that they hide what is there.
  const paper = (255 << 24 | separator[2] << 16 | separator[1] << 8 | separator[0]) >>> 0;
  if (notches.length * 8 < wide)
    for (const column of notches) for (let y = 0; y < high; y++) pixels[y * wide + Math.min(wide - 1, column)] = paper;
  const under = [high + Math.round(scale), high + Math.round(4 * scale)];
  for (let column = 0; column < wide; column++) {
    const at = column * BINS, gap = sums[at + B_GAP], lost = gap + sums[at + B_SLOTS];
    if (lost <= 0) continue;
    const bin = gap * 2 >= lost ? B_GAP : B_SLOTS;
    // Never so faint that it is not seen, and the fuller the more is lost.
    const alpha = Math.round(255 * Math.min(1, 0.35 + 1.3 * lost));
    for (let y = under[0]; y < under[1]; y++)
      for (let x = column; x < Math.min(wide, column + Math.ceil(2 * scale)); x++) pixels[y * wide + x] = (packedPalette[bin] & 0xffffff | alpha << 24) >>> 0;
  }
  return image;
}

function labelOf(from) {
  const v = views[view];
  const part = indexAt(v.at, from);
  if (part < 0) return "";
  const inside = from - v.at[part];
  const label = v.label[part];
  if (view === "physical" && label) return "chunk " + label.chunk + "." + (label.page + Math.floor(inside / PAGE));
  return v.line[part] < 0 ? "" : hex(addressOfLine(v.line[part] + inside));
}

function addressOfLine(line) {
  const range = ranges[Math.max(0, indexAt(rangeStarts, line))];
  return range.address + BigInt(Math.floor(line - range.start));
}

function draw() {
  const canvas = $("map"), context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  const style = getComputedStyle(document.documentElement);
  context.font = 11 * scale + "px ui-monospace, 'DejaVu Sans Mono', monospace";
  context.textBaseline = "middle";
  context.fillStyle = style.getPropertyValue("--soft");
  const count = visibleRows() + 1;
  if (rows.size > 1500) rows.clear();
  for (let n = 0; n < count; n++) {
    const from = top_ + n * rowBytes;
    if (from >= total()) break;
    const y = Math.round(n * pitch * scale) + Math.round(2 * scale);
    if (!rows.has(from)) rows.set(from, drawRow(from));
    context.fillText(labelOf(from), 6 * scale, y + rowHigh() * scale / 2);
    context.putImageData(rows.get(from), Math.round(GUTTER * scale), y);
  }
  $("scale").textContent = bytesText(rowBytes) + " a row";
  drawStrip();
  drawOverlay();
}

// All of it in one narrow strip, with a frame around what is seen: the scroll bar.
let stripImage = null, stripKey = "";
function drawStrip() {
  const canvas = $("strip"), context = canvas.getContext("2d");
  const key = [view, by, highlighted, canvas.height, document.documentElement.dataset.theme].join();
  if (key !== stripKey) {
    const high = canvas.height, sums = new Float64Array(high * BINS), per = total() / high || 1;
    walk(0, total(), (begin, end, bin) => {
      let y = Math.floor(begin / per);
      for (let at = begin; at < end && y < high; y++) {
        const stop = Math.min(end, (y + 1) * per);
        sums[y * BINS + bin] += stop - at;
        at = stop;
      }
    });
    const image = context.createImageData(canvas.width, high);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0; y < high; y++) {
      let x = 0, filled = 0;
      for (let bin = 0; bin < BINS; bin++) {
        filled += sums[y * BINS + bin] / per;
        for (const end = Math.round(Math.min(1, filled) * canvas.width); x < end; x++) pixels[y * canvas.width + x] = packedPalette[bin];
      }
    }
    [stripImage, stripKey] = [image, key];
  }
  context.putImageData(stripImage, 0, 0);
  const from = top_ / total() * canvas.height;
  const high = Math.max(4 * scale, Math.min(1, visibleRows() * rowBytes / total()) * canvas.height);
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  context.lineWidth = 2 * scale;
  context.strokeRect(scale, Math.min(from, canvas.height - high) + scale, canvas.width - 2 * scale, high - 2 * scale);
}

/** The intervals of the view that show an interval of the line. */
function placesOf(begin, end) {
  const v = views[view], found = [];
  if (view === "address") return [[begin, end]];
  for (let part = 0; part < v.at.length && found.length < 2000; part++) {
    if (v.line[part] < 0 || v.line[part] >= end || v.line[part] + v.length[part] <= begin) continue;
    const shift = v.at[part] - v.line[part];
    found.push([Math.max(begin, v.line[part]) + shift, Math.min(end, v.line[part] + v.length[part]) + shift]);
  }
  return found;
}

function drawOverlay() {
  const canvas = $("overlay"), context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (selected < 0) return;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  context.lineWidth = 2 * scale;
  const wide = columnsWide();
  for (const [begin, end] of placesOf(starts[selected], starts[selected + 1])) {
    const first = Math.max(0, Math.floor((begin - top_) / rowBytes)), last = Math.min(visibleRows(), Math.floor((end - 1 - top_) / rowBytes));
    for (let n = first; n <= last; n++) {
      const from = top_ + n * rowBytes;
      const a = (Math.max(begin, from) - from) / rowBytes * wide, b = (Math.min(end, from + rowBytes) - from) / rowBytes * wide;
      const y = n * pitch * scale + scale;
      context.strokeRect(GUTTER * scale + a - scale, y, Math.max(b - a, 2 * scale) + 2 * scale, (rowHigh() + 2) * scale);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- moving and zooming

function clampTop(at) {
  const most = Math.ceil(total() / rowBytes) - visibleRows();
  top_ = Math.max(0, Math.min(Math.round(at / rowBytes), most)) * rowBytes;
}

function fitRow() {
  let bytes = LEAST_ROW;
  while (bytes * Math.max(1, Math.floor(height / LEAST_PITCH)) < total()) bytes *= 2;
  return bytes;
}

/** Zooms by doublings, so that `at` (a byte of the view) stays in the row where it is. */
function zoom(doublings, at = top_ + rowBytes * visibleRows() / 2) {
  const row = Math.floor((at - top_) / rowBytes);
  const bytes = Math.max(LEAST_ROW, Math.min(fitRow(), rowBytes * 2 ** doublings));
  if (bytes === rowBytes) return;
  rowBytes = bytes;
  setPitch();
  rows.clear();
  clampTop(Math.floor(at / rowBytes) * rowBytes - row * rowBytes);
  draw();
}

function showAll() {
  rowBytes = fitRow();
  setPitch();
  top_ = 0;
  rows.clear();
  draw();
}

function moveRows(count) {
  clampTop(top_ + count * rowBytes);
  draw();
}

/** Shows a stroke, near enough to be seen. */
function reveal(i, near = false) {
  const [[begin, end]] = placesOf(starts[i], starts[i + 1]);
  if (near) {
    rowBytes = LEAST_ROW;
    while (rowBytes < (end - begin) * 3 && rowBytes < fitRow()) rowBytes *= 2;
    setPitch();
    rows.clear();
  }
  const seen = begin >= top_ && begin < top_ + visibleRows() * rowBytes;
  if (near || !seen) clampTop(Math.floor(begin / rowBytes) * rowBytes - Math.floor(visibleRows() / 2) * rowBytes);
  draw();
}

function select(i, near = false) {
  selected = i;
  fillSelected();
  if (i >= 0) reveal(i, near); else drawOverlay();
}

/** The byte of the view under a place of the stage; `null` outside. */
function byteAt(x, y) {
  const column = (x - GUTTER) * scale, wide = columnsWide();
  const row = Math.floor((y - 1) / pitch);
  if (column < 0 || column >= wide || row < 0) return null;
  const at = top_ + row * rowBytes + column / wide * rowBytes;
  return at < total() ? at : null;
}

/** The stroke at a byte of the view; -1 in spare memory. */
function strokeAt(at) {
  const v = views[view], part = indexAt(v.at, at);
  if (part < 0 || v.line[part] < 0) return -1;
  return indexAt(starts, v.line[part] + at - v.at[part], starts.length - 1);
}

function nextFree(direction) {
  const isFree = (i) => { const ink = facts.kinds[columns.kinds[i]][0]; return ink === WHOLE || ink === BOUND || ink === GAP; };
  const count = columns.lengths.length;
  for (let n = 1; n <= count; n++) {
    const i = ((selected < 0 ? (direction > 0 ? -1 : 0) : selected) + direction * n + 2 * count) % count;
    if (isFree(i)) { select(i); return; }
  }
}

// ---------------------------------------------------------------------------------------------------- what is said in words

function describe(i, at) {
  if (i < 0) {
    const v = views.physical, label = v.label[indexAt(v.at, at)];
    return [["", INK_NAMES[SPARE]], ["page", label ? "chunk " + label.chunk + ", page " + (label.page + Math.floor((at - v.at[indexAt(v.at, at)]) / PAGE)) : "-"]];
  }
  const f = strokeFacts(i);
  const lines = [["", INK_NAMES[f.ink]], ["address", hex(f.address)], ["bytes", exact(f.bytes)]];
  if (f.block) {
    lines.push(["requested", exact(f.requested)]);
    lines.push(["lifetime", LIFETIMES[f.lifetime % 4]], ["stream", f.stream], ["step", f.step], ["age", f.age + (f.age === 1 ? " step" : " steps")]);
  } else if (f.stream !== NOBODY) lines.push(["lifetime", LIFETIMES[f.lifetime % 4]], ["stream", f.stream]);
  if (f.slot) lines.push(["size class", bytesText(f.slot)]);
  if (f.capture) lines.push(["capture", f.capture]);
  lines.push(["page", pageText(at === undefined ? starts[i] : lineAt(at))]);
  const kinds = ["span", "stitched pages", "alone"];
  lines.push(["range", kinds[f.range.kind] + " at " + hex(f.range.address) + ", " + bytesText(f.range.end - f.range.start)]);
  return lines;
}

function lineAt(at) {
  const v = views[view], part = indexAt(v.at, at);
  return v.line[part] + at - v.at[part];
}

/** Fills a list of terms. */
function fillTerms(list, lines) {
  list.replaceChildren(...lines.flatMap(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name || "what";
    text.textContent = value;
    return [term, text];
  }));
}

function fillSelected() {
  fillTerms($("selected"), selected < 0 ? [["nothing", "click a piece, or press an arrow key"]] : describe(selected));
}

function showTip(x, y) {
  const tip = $("tip"), at = byteAt(x, y);
  if (at === null) { tip.hidden = true; return; }
  const lines = describe(strokeAt(at), at);
  // How many are under the pointer: a column of many blocks is no block.
  const perColumn = rowBytes / columnsWide();
  const i = strokeAt(at), j = i < 0 ? i : strokeAt(Math.min(at + perColumn, total() - 1));
  if (view === "address" && j - i > 1) lines.push(["here", (j - i + 1) + " pieces in one column; zoom in"]);
  tip.textContent = lines.map(([name, value]) => name ? name + ": " + value : value).join("\n");
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 6)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > height ? Math.max(2, y - tip.offsetHeight - 10) : y + 18) + "px";
}

/** The largest of those that `measure` gives a length to: [index, length] pairs. */
function largest(count, most, measure) {
  const found = [];
  let least = 0;
  const cut = () => { found.sort((a, b) => b[1] - a[1] || a[0] - b[0]); found.length = Math.min(found.length, most); };
  for (let i = 0; i < count; i++) {
    const length = measure(i);
    if (length > least) {
      found.push([i, length]);
      if (found.length >= 4 * most) { cut(); least = found[found.length - 1][1]; }
    }
  }
  cut();
  return found;
}

function fillLists() {
  const count = columns.lengths.length;
  const inks = Uint8Array.from(facts.kinds, (kind) => kind[0]);
  const isFree = (i) => { const ink = inks[columns.kinds[i]]; return ink === WHOLE || ink === BOUND || ink === GAP; };
  const ends = new Uint8Array(count + 1);
  for (const range of ranges) ends[range.first] = 1;
  // A run is told by its first stroke.
  const runLength = (i) => {
    if (!isFree(i) || (i > 0 && !ends[i] && isFree(i - 1))) return 0;
    let end = i + 1;
    while (end < count && !ends[end] && isFree(end)) end++;
    return starts[end] - starts[i];
  };
  const entry = (i, length, note) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    for (const [tag, text] of [["span", hex(strokeFacts(i).address)], ["small", note], ["b", bytesText(length)]]) {
      const part = document.createElement(tag);
      part.textContent = text;
      button.append(part);
    }
    button.addEventListener("click", () => select(i, true));
    item.append(button);
    return item;
  };
  $("runs").replaceChildren(...largest(count, 100, runLength).map(([i, length]) => entry(i, length, "")));
  const live = largest(count, 100, (i) => inks[columns.kinds[i]] === LIVE ? starts[i + 1] - starts[i] : 0);
  $("blocks").replaceChildren(...live.map(([i, length]) => entry(i, length, LIFETIMES[strokeFacts(i).lifetime % 4] + " " + columns.steps[i])));
}

function fillSummary() {
  const { process, sums } = facts;
  const rank = process.rank === null ? "" : ", rank " + process.rank;
  $("title").textContent = "process " + process.pid + rank + ", device " + facts.device + " " + (facts.name || "");
  $("subtitle").textContent = "step " + facts.step + " · " + facts.taken.slice(0, 19).replace("T", " ") + " UTC · " + process.host + " · " + process.command;
  $("subtitle").title = process.command;
  document.title = "gruyere map " + process.pid;
  const free = sums.free_whole_bytes + sums.free_partial_bytes + sums.spare_bytes;
  const figures = [["held", bytesText(sums.held_bytes)], ["live", bytesText(sums.live_bytes) + " (" + share(sums.live_bytes, sums.held_bytes) + ")"],
    ["blocks", sums.live_blocks.toLocaleString("en")], ["pending", bytesText(sums.pending_bytes)], ["free", bytesText(free)],
    ["lost in partly used pages", bytesText(sums.free_partial_bytes) + " (" + share(sums.free_partial_bytes, sums.held_bytes) + ")", "lost"],
    ["largest free run", bytesText(sums.largest_free_run_bytes)], ["can be joined to one run", bytesText(sums.movable_bytes)]];
  $("figures").replaceChildren(...figures.map(([name, value, kind]) => {
    const span = document.createElement("span"), b = document.createElement("b");
    if (kind) span.className = kind;
    b.textContent = value;
    span.append(name + " ", b);
    return span;
  }));
  const p = sums.pages, a = sums.address_space;
  const terms = [["pages, full", p.full], ["partly used", p.partly_used], ["free", p.free], ["spare", p.spare],
    ["free slots", bytesText(sums.free_slot_bytes)], ["rests of slots", bytesText(sums.slot_rest_bytes)], ["tails of slabs", bytesText(sums.slab_tail_bytes)],
    ["gaps between blocks", bytesText(sums.gap_bytes)],
    ["ranges", ranges.length], ["reserved addresses", bytesText(a.reserved_bytes)], ["shadows", bytesText(a.shadow_bytes)], ["retired mappings", bytesText(a.retired_bytes)]];
  const misfits = Object.values(facts.misfits).reduce((sum, n) => sum + n, 0);
  if (misfits) terms.push(["did not fit together", misfits]);
  fillTerms($("pages"), terms);
}

function fillLegend() {
  const names = classNames(), sums = new Float64Array(BINS);
  for (let i = 0; i < bins.length; i++) sums[bins[i]] += columns.lengths[i] * facts.unit;
  sums[B_SPARE] = facts.sums.spare_bytes;
  const entries = names.map((name, bin) => [name, bin]).concat([["pending", B_PENDING], ["free slots, rests, tails", B_SLOTS],
    ["gaps in partly used pages", B_GAP], ["whole pages that stay", B_BOUND], ["free whole pages", B_WHOLE], ["spare pages", B_SPARE]]);
  const there = entries.filter(([, bin]) => sums[bin] > 0);
  const colour = (bin) => "rgb(" + palette[bin].join(" ") + ")";
  $("legend").replaceChildren(...there.map(([name, bin]) => {
    const button = document.createElement("button"), mark = document.createElement("i"), small = document.createElement("small");
    button.type = "button";
    button.setAttribute("aria-pressed", String(bin === highlighted));
    mark.style.background = colour(bin);
    small.textContent = bytesText(sums[bin]) + ", " + share(sums[bin], facts.sums.held_bytes);
    button.append(mark, name, small);
    button.addEventListener("click", () => { highlighted = highlighted === bin ? -1 : bin; recolour(); });
    return button;
  }));
  $("bar").replaceChildren(...there.map(([name, bin]) => {
    const part = document.createElement("div");
    part.style.background = colour(bin);
    part.style.flex = sums[bin] + " 0 0";
    part.title = name + ": " + bytesText(sums[bin]);
    return part;
  }));
}

// ---------------------------------------------------------------------------------------------------- the timeline

function drawTimeline(hover = null) {
  const { time, step, liveLow, liveHigh, reserved } = facts.timeline;
  if (time.length < 2) return;
  const canvas = $("timeline"), context = canvas.getContext("2d");
  const wide = canvas.clientWidth, high = canvas.clientHeight;
  canvas.width = wide * scale;
  canvas.height = high * scale;
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name);
  const first = time[0], span = Math.max(1e-6, time[time.length - 1] - first);
  const most = Math.max(...reserved, ...liveHigh, 1) * 1.06;
  const left = GUTTER, right = wide - 12, bottom = high - 18;
  const x = (t) => left + (t - first) / span * (right - left), y = (b) => bottom - b / most * (bottom - 6);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (let n = 0; n <= 2; n++) {
    const value = most / 1.06 * n / 2;
    context.strokeStyle = colour("--line");
    context.beginPath(); context.moveTo(left, y(value)); context.lineTo(right, y(value)); context.stroke();
    context.fillStyle = colour("--soft");
    context.fillText(bytesText(value), 6, Math.min(bottom - 4, Math.max(9, y(value))));
  }
  // Marks of steps: a line each where there is room, else every so many.
  const marks = [];
  for (let i = 1; i < time.length; i++) if (step[i] !== step[i - 1]) marks.push(i);
  const every = Math.max(1, Math.ceil(marks.length * 5 / (right - left)));
  let labelEnd = 0;
  marks.forEach((i, n) => {
    if (n % every) return;
    const at = x(time[i]), text = String(step[i]);
    context.strokeStyle = colour("--line");
    context.beginPath(); context.moveTo(at, 4); context.lineTo(at, bottom); context.stroke();
    if (at > labelEnd + 6) {
      context.fillStyle = colour("--soft");
      context.fillText(text, at, high - 8);
      labelEnd = at + context.measureText(text).width;
    }
  });
  context.fillStyle = colour("--soft");
  context.fillText("steps", 6, high - 8);
  // Live: the band between its lows and its highs.
  context.beginPath();
  time.forEach((t, i) => context.lineTo(x(t), y(liveHigh[i])));
  context.lineTo(right, bottom); context.lineTo(left, bottom);
  context.fillStyle = colour("--live-fill");
  context.fill();
  const line = (values, name, dash = []) => {
    context.strokeStyle = colour(name);
    context.setLineDash(dash);
    context.beginPath();
    time.forEach((t, i) => context.lineTo(x(t), y(values[i])));
    context.stroke();
    context.setLineDash([]);
  };
  line(liveLow, "--live-line", [1, 2]);
  context.lineWidth = 1.5;
  line(liveHigh, "--live-line");
  line(reserved, "--reserved-line", [5, 3]);
  const say = (text, name, at) => {
    context.fillStyle = colour("--paper");
    context.fillRect(at - 3, 4, context.measureText(text).width + 6, 16);
    context.fillStyle = colour(name);
    context.fillText(text, at, 12);
  };
  let at = left + 8;
  if (hover === null) {
    say("live (highs, lows)", "--live-line", at);
    say("reserved", "--reserved-line", at + 112);
  } else {
    let i = indexAt(time, first + (hover - left) / (right - left) * span);
    i = Math.max(0, Math.min(time.length - 1, i));
    context.strokeStyle = colour("--mark");
    context.lineWidth = 1;
    context.beginPath(); context.moveTo(x(time[i]), 0); context.lineTo(x(time[i]), bottom); context.stroke();
    say("step " + step[i] + ", " + ((time[time.length - 1] - time[i]) / 1000).toFixed(1) + " s before the end: live " + bytesText(liveLow[i]) + " to " +
      bytesText(liveHigh[i]) + ", reserved " + bytesText(reserved[i]), "--ink", at);
  }
}

// ---------------------------------------------------------------------------------------------------- the page

function setView(name) {
  view = name;
  for (const button of document.querySelectorAll("#views button")) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  showAll();
  if (selected >= 0) reveal(selected);
}

function recolour() {
  classify();
  readColours();
  fillLegend();
  draw();
  drawTimeline();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (bins) recolour();
}

function layOut() {
  const stage = $("stage");
  const same = width === stage.clientWidth && height === stage.clientHeight && scale === (window.devicePixelRatio || 1);
  if (same) return;
  const all = rowBytes === 0 || top_ === 0 && rowBytes * visibleRows() >= total();
  width = stage.clientWidth;
  height = stage.clientHeight;
  scale = window.devicePixelRatio || 1;
  for (const id of ["map", "overlay"]) {
    const canvas = $(id);
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    canvas.width = width * scale; canvas.height = height * scale;
  }
  const strip = $("strip");
  strip.style.width = STRIP + "px"; strip.style.height = height + "px";
  strip.width = STRIP * scale; strip.height = Math.max(1, height * scale);
  rows.clear();
  if (all) showAll(); else { setPitch(); clampTop(top_); draw(); }
  drawTimeline();
}

/** Reads an address as people write it: 0x..., plain hexadecimal, or decimal. */
function findAddress(text) {
  const plain = text.trim().toLowerCase().replaceAll("_", "");
  const found = $("found");
  if (!plain) { found.textContent = ""; return; }
  let wanted;
  try {
    wanted = BigInt(/^\d+$/.test(plain) || plain.startsWith("0x") ? plain : "0x" + plain);
  } catch {
    found.textContent = "not an address";
    return;
  }
  const range = ranges.find((r) => wanted >= r.address && wanted < r.address + BigInt(r.end - r.start));
  found.textContent = range ? "" : "nothing is mapped there";
  if (range) select(indexAt(starts, range.start + Number(wanted - range.address), starts.length - 1), true);
}

const keys = {
  "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1), "0": showAll,
  ArrowUp: () => moveRows(-1), ArrowDown: () => moveRows(1),
  PageUp: () => moveRows(1 - visibleRows()), PageDown: () => moveRows(visibleRows() - 1),
  Home: () => moveRows(-1e15), End: () => moveRows(1e15),
  ArrowLeft: () => select(Math.max(0, selected - 1)),
  ArrowRight: () => select(Math.min(columns.lengths.length - 1, selected + 1)),
  Enter: () => selected >= 0 && reveal(selected, true),
  f: () => nextFree(1), F: () => nextFree(-1),
  v: () => setView(view === "address" ? "physical" : "address"),
  c: () => { const list = $("by"); list.selectedIndex = (list.selectedIndex + 1) % list.length; by = list.value; highlighted = -1; recolour(); },
  t: () => $("theme").click(),
  "/": () => $("address").focus(),
  "?": () => $("help").showModal(),
  Escape: () => { highlighted = -1; selected = -1; fillSelected(); recolour(); },
};

function listen() {
  const map = $("map"), strip = $("strip");
  let drag = null;
  map.addEventListener("pointerdown", (event) => {
    drag = { y: event.offsetY, top: top_, moved: false };
    map.setPointerCapture(event.pointerId);
  });
  map.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.offsetY - drag.y) > 4) {
      drag.moved = true;
      clampTop(drag.top - (event.offsetY - drag.y) / pitch * rowBytes);
      draw();
    }
    showTip(event.offsetX, event.offsetY);
  });
  map.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const at = byteAt(event.offsetX, event.offsetY);
      if (at !== null) select(strokeAt(at));
    }
    drag = null;
  });
  map.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  map.addEventListener("dblclick", () => { if (selected >= 0) reveal(selected, true); });
  // A wheel tells of its turns in small parts; a doubling is a whole one.
  let turned = 0;
  map.addEventListener("wheel", (event) => {
    event.preventDefault();
    const amount = event.deltaMode === 1 ? event.deltaY * 33 : event.deltaY || event.deltaX;
    if (event.shiftKey) { moveRows(Math.sign(amount) * 3); return; }
    turned += amount;
    if (Math.abs(turned) < 60) return;
    zoom(Math.sign(turned), byteAt(event.offsetX, event.offsetY) ?? undefined);
    turned = 0;
    showTip(event.offsetX, event.offsetY);
  }, { passive: false });
  const scrub = (event) => {
    if (event.type === "pointerdown") strip.setPointerCapture(event.pointerId);
    else if (!event.buttons) return;
    clampTop(event.offsetY / height * total() - visibleRows() * rowBytes / 2);
    draw();
  };
  strip.addEventListener("pointerdown", scrub);
  strip.addEventListener("pointermove", scrub);
  for (const button of document.querySelectorAll("#views button")) button.addEventListener("click", () => setView(button.dataset.view));
  $("by").addEventListener("change", () => { by = $("by").value; highlighted = -1; recolour(); });
  $("in").addEventListener("click", () => zoom(-1));
  $("out").addEventListener("click", () => zoom(1));
  $("fit").addEventListener("click", showAll);
  $("keys").addEventListener("click", () => $("help").showModal());
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("search").addEventListener("submit", (event) => { event.preventDefault(); findAddress($("address").value); });
  $("timeline").addEventListener("pointermove", (event) => drawTimeline(event.offsetX));
  $("timeline").addEventListener("pointerleave", () => drawTimeline());
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || $("help").open;
    if (event.key === "Escape" && event.target.tagName === "INPUT") { event.target.blur(); return; }
    // A button takes Enter for itself.
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || event.key === "Enter" && event.target.tagName === "BUTTON") return;
    event.preventDefault();
    keys[event.key]();
  });
  new ResizeObserver(layOut).observe($("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
}

/** What the address bar says behind `#`: theme, view, colours, an address; so a link can point at something. */
function fromLink() {
  const wish = new URLSearchParams(location.hash.slice(1));
  if (["dark", "light"].includes(wish.get("theme"))) document.documentElement.dataset.theme = wish.get("theme");
  if (["lifetime", "age", "size", "stream"].includes(wish.get("by"))) $("by").value = by = wish.get("by");
  return () => {
    if (wish.get("view") === "physical") setView("physical");
    if (wish.get("at")) findAddress(wish.get("at"));
  };
}

async function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const follow = fromLink();
  columns = await readColumns();
  arrange();
  classify();
  readColours();
  fillSummary();
  fillLegend();
  fillSelected();
  if (facts.timeline.time.length < 2) document.querySelector("footer").hidden = true;
  rowBytes = 0;
  setViewButtons();
  layOut();
  listen();
  follow();
  // Two frames on, what was drawn has been shown, and input is answered. Tests read this mark.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
    document.documentElement.dataset.strokes = String(columns.lengths.length);
    // Looks at every stroke a few times: not before the first picture.
    setTimeout(() => { fillLists(); document.documentElement.dataset.complete = String(Math.round(performance.now())); });
  }));
}

function setViewButtons() {
  for (const button of document.querySelectorAll("#views button")) button.setAttribute("aria-pressed", String(button.dataset.view === view));
}

start().catch((error) => {
  $("subtitle").textContent = "This page could not be drawn: " + error.message + ". It needs a browser of 2023 or later.";
  document.documentElement.dataset.failed = String(error);
});
