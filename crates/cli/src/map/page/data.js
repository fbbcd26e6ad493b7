// Draws the layout of a device's memory out of the columns that `gruyere map --html` embedded (html.rs writes them).
//
// All that is mapped is one row of bytes, the *line*: range behind range, by address. A stroke (a block, or a piece of free memory of one kind) is an interval
// of it. A *view* is an order in which parts of the line are shown: by address it is the line itself, by physical page it jumps through it. The canvas
// shows a view in rows of a power of two of bytes; each column of a row adds up the bytes of each colour in it, and is filled from below in that
// proportion. So a column is right at any zoom, whether it is a part of one block or all of ten thousand. Rows are drawn once and kept.

// What strokes show; the numbers are those of strokes.rs.
const LIVE = 0, PENDING = 1, WHOLE = 2, BOUND = 3, GAP = 4, SLOTS = 5, REST = 6, TAIL = 7, SPARE = 8;
const INK_NAMES = ["live block", "pending block (waits for streams)", "idle (whole free pages)", "idle, but usable only there",
  "lost: free between live blocks", "lost: free slots of a slab", "lost: rest of a slot", "lost: tail of a slab", "idle, mapped nowhere"];
const LIFETIMES = ["auto", "transient", "step", "persistent"];
// By number, as crates/record/src/shared/sites.rs.
const PHASES = ["not known", "forward", "backward", "optimizer", "collective"];
// Lines and modules that have a colour; behind them the others, and what is not known.
const NAMED = 10, STREAMS = 8;
// What stands on pieces of a class, and in the legend: the same without colours.
const LETTERS = "ABCDEFGHIJKL";
const NOBODY = 0xffffffff;
// As crates/record/src/stream.rs.
const ALL_STREAMS = 4094;
const streamText = (stream) => stream === NOBODY ? "none" : stream === ALL_STREAMS ? "all" : stream;
const PAGE = 2 * 1024 * 1024;

// Bins: what a column of a row adds up. First the classes of live blocks, then the rest, in the order they are stacked from below.
const CLASSES = 12, B_PENDING = 12, B_REST = 13, B_SLOTS = 14, B_GAP = 15, B_BOUND = 16, B_WHOLE = 17, B_SPARE = 18, BINS = 19;
const BIN_OF_INK = [0, B_PENDING, B_WHOLE, B_BOUND, B_GAP, B_SLOTS, B_REST, B_REST, B_SPARE];
const AGES = [[0, "this step"], [1, "1 step"], [3, "2-3 steps"], [15, "4-15 steps"], [255, "16-255 steps"], [Infinity, "older"]];
const SIZES = [[4096, "to 4 KiB"], [65536, "to 64 KiB"], [1 << 20, "to 1 MiB"], [16 << 20, "to 16 MiB"], [256 << 20, "to 256 MiB"], [Infinity, "larger"]];

const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);

// Numbers for people.

function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
  return (unit === 0 || Number.isInteger(n) ? n : n.toFixed(2)) + " " + units[unit];
}
const exact = (n) => n < 1024 ? n + " B" : bytesText(n) + " (" + n.toLocaleString("en") + " B)";
const share = (part, whole) => whole <= 0 ? "-" : part > 0 && part / whole < 0.0005 ? "<0.1%" : (100 * part / whole).toFixed(1) + "%";
const hex = (big) => "0x" + big.toString(16);

// The data.

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
  const [ink, lifetime, capture, stream, slot, site] = facts.kinds[columns.kinds[i]];
  const range = ranges[indexAt(rangeStarts, starts[i])];
  const bytes = starts[i + 1] - starts[i];
  const block = ink === LIVE || ink === PENDING;
  return {
    i, ink, lifetime, capture, stream, slot, range, bytes, block, site: siteOf(site),
    address: range.address + BigInt(starts[i] - range.start),
    requested: block ? Math.max(0, bytes - columns.slack[i]) : 0,
    step: columns.steps[i],
    age: Math.max(0, facts.step - columns.steps[i]),
  };
}

/** What is known of a site: its line, its module (or line), the phase, the stack, innermost first. */
function siteOf(number) {
  const entry = facts.sites.by_number[number];
  if (!entry) return null;
  const [line, module, phase, stack] = entry;
  return { line: facts.sites.places[line], module: facts.sites.places[module], phase, stack: stack.map((frame) => facts.sites.frames[frame]) };
}

/** A lifetime, or what was being done where it is not told. */
const lifetimeText = (lifetime, site) => lifetime % 4 === 0 && site && site.phase > 0 ? PHASES[site.phase] : LIFETIMES[lifetime % 4];

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

// Classes and colours.

let by = facts.by;
let highlighted = -1;      // the bin that the legend singles out
let classOfKind;           // by kind: the class where it follows from the kind alone, else 255
let palette;               // by bin: [r, g, b]
let packedPalette;         // by bin: as the canvas stores it
let separator;

const classNames = () => ({
  lifetime: () => [...LIFETIMES, ...PHASES.slice(1)],
  age: () => AGES.map((age) => age[1]),
  size: () => SIZES.map((size) => size[1]),
  stream: () => names,
  site: () => names,
  module: () => names,
  phase: () => PHASES,
})[by]();

/** Live bytes by what `keyOf` says of a kind, the most first. */
function largestKeys(keyOf) {
  const sums = new Map(), ofKind = facts.kinds.map((kind) => kind[0] === LIVE ? keyOf(kind) : undefined);
  const { lengths, kinds } = columns;
  for (let i = 0; i < lengths.length; i++) {
    const key = ofKind[kinds[i]];
    if (key !== undefined) sums.set(key, (sums.get(key) || 0) + lengths[i]);
  }
  return [...sums].sort((a, b) => b[1] - a[1]).map((entry) => entry[0]);
}

// Classes that are made of what there is: of each stream, or number of a place, and their names.
let classOfKey = new Map(), names = [];

/** The most common streams by their numbers, and the others. */
function classifyStreams() {
  const order = largestKeys((kind) => kind[3]);
  const named = order.slice(0, order.length > STREAMS ? STREAMS - 1 : STREAMS);
  classOfKey = new Map(named.map((stream, n) => [stream, n]));
  names = named.map((stream) => "stream " + streamText(stream));
  if (order.length > STREAMS) names.push("other streams");
}

/** What a kind is shown as: its line, or all modules that differ from its own in numbers only; -1: not known. */
const placeOf = (kind) => facts.sites.by_number[kind[5]]?.[by === "site" ? 0 : 4] ?? -1;

/** The ten lines or modules that hold most, the others, and what is not known. */
function classifyPlaces() {
  const order = largestKeys(placeOf).filter((place) => place >= 0);
  const named = order.slice(0, NAMED);
  classOfKey = new Map(named.map((place, n) => [place, n]));
  classOfKey.set(-1, NAMED + 1);
  names = named.map((place) => facts.sites.places[place]);
  names[NAMED] = order.length - named.length + " others";
  names[NAMED + 1] = PHASES[0];
}

/** The class of a kind's blocks, where it follows from the kind alone; else 255. */
function classOfOne(kind) {
  const phase = facts.sites.by_number[kind[5]]?.[2] ?? 0, lifetime = kind[1] % LIFETIMES.length;
  switch (by) {
    case "lifetime": return lifetime === 0 && phase > 0 ? LIFETIMES.length - 1 + phase : lifetime;
    case "phase": return phase;
    case "stream": return classOfKey.get(kind[3]) ?? STREAMS - 1;
    case "site": case "module": return classOfKey.get(placeOf(kind)) ?? NAMED;
    default: return 255;
  }
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
  if (by === "stream") classifyStreams();
  if (by === "site" || by === "module") classifyPlaces();
  classOfKind = Uint8Array.from(facts.kinds, classOfOne);
  bins ??= new Uint8Array(columns.lengths.length);
  for (let i = 0; i < bins.length; i++) bins[i] = binOf(i);
}

/** A colour of the style, for a canvas. */
const paint = (name) => "rgb(" + colourOf(name).join(" ") + ")";

function readColours() {
  const read = colourOf;
  const [kind, count] = {
    lifetime: ["--lifetime-", 8], age: ["--ramp-", 6], size: ["--ramp-", 6], stream: ["--stream-", STREAMS], site: ["--site-", CLASSES],
    module: ["--site-", CLASSES], phase: ["--phase-", 5],
  }[by];
  palette = [];
  for (let n = 0; n < CLASSES; n++) palette.push(read(kind + n % count));
  for (const name of ["--pending", "--rest", "--slots", "--gap", "--bound", "--whole", "--spare"]) palette.push(read(name));
  const paper = read("--paper");
  separator = paper;
  const faded = (colour) => colour.map((part, n) => Math.round(part * 0.18 + paper[n] * 0.82));
  const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  packedPalette = Uint32Array.from(palette, (colour, bin) =>
    pack(highlighted < 0 || bin === highlighted || bin === B_WHOLE ? colour : faded(colour)));
  rows.clear();
}
