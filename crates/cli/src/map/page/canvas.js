// The canvas of rows, the strip beside it, and moving and zooming in them.

const GUTTER = 118, STRIP = 18, SPACE = 6, LEAST_PITCH = 19, MOST_PITCH = 46, LEAST_ROW = 8192;
let pitch = LEAST_PITCH;                   // from row to row, in CSS pixels: a row and the space below it
let view = "address";
let width = 0, height = 0, scale = 1;      // of the stage, in CSS pixels, and device pixels in each
let rowBytes = 1 << 30, topByte = 0;          // bytes a row, and the byte of the view that is at the top (a multiple of rowBytes)
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
  const borders = [], notches = [], letters = [];
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
    if (bin < CLASSES && b - a > 16 * scale) letters.push([(a + b) / 2, LETTERS[bin]]);
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
    const at = column * BINS, gap = sums[at + B_GAP], slots = sums[at + B_SLOTS], lost = gap + slots + sums[at + B_REST];
    if (lost <= 0) continue;
    const bin = gap * 2 >= lost ? B_GAP : slots * 2 >= lost ? B_SLOTS : B_REST;
    // Never so faint that it is not seen, and the fuller the more is lost.
    const alpha = Math.round(255 * Math.min(1, 0.35 + 1.3 * lost));
    for (let y = under[0]; y < under[1]; y++)
      for (let x = column; x < Math.min(wide, column + Math.ceil(2 * scale)); x++) pixels[y * wide + x] = (packedPalette[bin] & 0xffffff | alpha << 24) >>> 0;
  }
  return { image, letters };
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
  const soft = paint("--soft");
  context.font = 11 * scale + "px ui-monospace, 'DejaVu Sans Mono', monospace";
  context.textBaseline = "middle";
  const count = visibleRows() + 1;
  if (rows.size > 1500) rows.clear();
  for (let n = 0; n < count; n++) {
    const from = topByte + n * rowBytes;
    if (from >= total()) break;
    const y = Math.round(n * pitch * scale) + Math.round(2 * scale);
    if (!rows.has(from)) rows.set(from, drawRow(from));
    const { image, letters } = rows.get(from), middle = y + rowHigh() * scale / 2, left = Math.round(GUTTER * scale);
    context.fillStyle = soft;
    context.textAlign = "left";
    context.fillText(labelOf(from), 6 * scale, middle);
    context.putImageData(image, left, y);
    context.textAlign = "center";
    for (const [at, letter] of letters) {
      context.fillStyle = "#ffffffb3";
      context.fillRect(left + at - 5 * scale, middle - 6 * scale, 10 * scale, 12 * scale);
      context.fillStyle = "#000";
      context.fillText(letter, left + at, middle);
    }
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
  const from = topByte / total() * canvas.height;
  const high = Math.max(4 * scale, Math.min(1, visibleRows() * rowBytes / total()) * canvas.height);
  context.strokeStyle = paint("--mark");
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
  context.strokeStyle = paint("--mark");
  context.lineWidth = 2 * scale;
  const wide = columnsWide();
  for (const [begin, end] of placesOf(starts[selected], starts[selected + 1])) {
    const first = Math.max(0, Math.floor((begin - topByte) / rowBytes)), last = Math.min(visibleRows(), Math.floor((end - 1 - topByte) / rowBytes));
    for (let n = first; n <= last; n++) {
      const from = topByte + n * rowBytes;
      const a = (Math.max(begin, from) - from) / rowBytes * wide, b = (Math.min(end, from + rowBytes) - from) / rowBytes * wide;
      const y = n * pitch * scale + scale;
      context.strokeRect(GUTTER * scale + a - scale, y, Math.max(b - a, 2 * scale) + 2 * scale, (rowHigh() + 2) * scale);
    }
  }
}

function clampTop(at) {
  const most = Math.ceil(total() / rowBytes) - visibleRows();
  topByte = Math.max(0, Math.min(Math.round(at / rowBytes), most)) * rowBytes;
}

function fitRow() {
  let bytes = LEAST_ROW;
  while (bytes * Math.max(1, Math.floor(height / LEAST_PITCH)) < total()) bytes *= 2;
  return bytes;
}

/** Zooms by doublings, so that `at` (a byte of the view) stays in the row where it is. */
function zoom(doublings, at = topByte + rowBytes * visibleRows() / 2) {
  const row = Math.floor((at - topByte) / rowBytes);
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
  topByte = 0;
  rows.clear();
  draw();
}

function moveRows(count) {
  clampTop(topByte + count * rowBytes);
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
  const seen = begin >= topByte && begin < topByte + visibleRows() * rowBytes;
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
  const at = topByte + row * rowBytes + column / wide * rowBytes;
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
