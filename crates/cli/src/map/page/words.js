// What is said in words: tool tip, selection, lists, summary, legend.

function describe(i, at) {
  if (i < 0) {
    const v = views.physical, label = v.label[indexAt(v.at, at)];
    return [["", INK_NAMES[SPARE]], ["page", label ? "chunk " + label.chunk + ", page " + (label.page + Math.floor((at - v.at[indexAt(v.at, at)]) / PAGE)) : "-"]];
  }
  const f = strokeFacts(i);
  const lines = [["", INK_NAMES[f.ink]], ["address", hex(f.address)], ["bytes", exact(f.bytes)]];
  if (f.block) {
    lines.push(["requested", exact(f.requested)]);
    lines.push([f.lifetime % 4 === 0 && f.site?.phase ? "phase" : "lifetime", lifetimeText(f.lifetime, f.site)]);
    lines.push(["stream", streamText(f.stream)], ["step", f.step], ["age", f.age + (f.age === 1 ? " step" : " steps")]);
    if (f.site) lines.push(["line", f.site.line]);
    if (f.site && f.site.module !== f.site.line) lines.push(["module", f.site.module]);
    if (f.site?.phase && f.lifetime % 4 !== 0) lines.push(["phase", PHASES[f.site.phase]]);
  } else if (f.stream !== NOBODY) lines.push(["lifetime", LIFETIMES[f.lifetime % 4]], ["stream", streamText(f.stream)]);
  if (f.slot) lines.push(["size class", bytesText(f.slot)]);
  if (f.capture) lines.push(["capture", f.capture]);
  lines.push(["page", pageText(at === undefined ? starts[i] : lineAt(at))]);
  const kinds = ["span", "stitched pages", "alone"];
  lines.push(["range", kinds[f.range.kind] + " at " + hex(f.range.address) + ", " + bytesText(f.range.end - f.range.start)]);
  if (f.block && f.site?.stack.length) lines.push(["stack", f.site.stack.join("\n")]);
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
    if (name === "stack") term.className = text.className = "frames";
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
  tip.textContent = lines.map(([name, value]) => name === "stack" ? "stack:\n" + value.replaceAll(/^.*\//gm, "") : name ? name + ": " + value : value).join("\n");
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
  $("blocks").replaceChildren(...live.map(([i, length]) => entry(i, length, blockNote(strokeFacts(i)))));
}

/** A block in a word or two: its line, or its lifetime and step. */
const blockNote = (f) => f.site ? f.site.line.split(" in ")[0] : LIFETIMES[f.lifetime % 4] + " " + f.step;

function fillSummary() {
  const { process, sums } = facts;
  const rank = process.rank === null ? "" : ", rank " + process.rank;
  $("title").textContent = "process " + process.pid + rank + ", device " + facts.device + " " + (facts.name || "");
  $("subtitle").textContent = "step " + facts.step + " · " + facts.taken.slice(0, 19).replace("T", " ") + " UTC · " + process.host + " · " + process.command;
  $("subtitle").title = process.command;
  document.title = "gruyere map " + process.pid;
  const idle = sums.free_whole_bytes + sums.spare_bytes;
  const figures = [["held", bytesText(sums.held_bytes)], ["live", bytesText(sums.live_bytes) + " (" + share(sums.live_bytes, sums.held_bytes) + ")"],
    ["blocks", sums.live_blocks.toLocaleString("en")], ["waiting for streams", bytesText(sums.pending_bytes)],
    ["idle (whole free pages)", bytesText(idle)],
    ["lost (free between live blocks)", bytesText(sums.free_partial_bytes) + " (" + share(sums.free_partial_bytes, sums.held_bytes) + ")", "lost"],
    ["largest free run", bytesText(sums.largest_free_run_bytes)], ["can move or go back", bytesText(sums.movable_bytes)]];
  if (sums.free_whole_bound_bytes > 0)
    figures.splice(5, 0, ["of it usable only there", bytesText(sums.free_whole_bound_bytes) + " (" + share(sums.free_whole_bound_bytes, sums.held_bytes) + ")"]);
  $("figures").replaceChildren(...figures.map(([name, value, kind]) => {
    const span = document.createElement("span"), b = document.createElement("b");
    if (kind) span.className = kind;
    b.textContent = value;
    span.append(name + " ", b);
    return span;
  }));
  fillVerdict(facts.conclusion);
  $("notes").textContent = facts.notes.join("\n");
  $("notes").hidden = facts.notes.length === 0;
  const p = sums.pages, a = sums.address_space;
  const terms = [["pages, full", p.full], ["partly used", p.partly_used], ["free", p.free], ["spare", p.spare],
    ["free slots", bytesText(sums.free_slot_bytes)], ["rests of slots", bytesText(sums.slot_rest_bytes)], ["tails of slabs", bytesText(sums.slab_tail_bytes)],
    ["gaps between blocks", bytesText(sums.gap_bytes)],
    ["ranges", ranges.length], ["reserved addresses", bytesText(a.reserved_bytes)], ["mapped twice", bytesText(a.shadow_bytes)], ["about to be unmapped", bytesText(a.retired_bytes)]];
  fillTerms($("pages"), terms);
}

/** What the process's memory comes to: its first sentence, and the others on demand. */
function fillVerdict({ cause, lines }) {
  const verdict = $("verdict"), said = [];
  // A line that goes on where the one before it was cut begins with two blanks.
  for (const line of lines)
    if (line.startsWith("  ") && said.length) said.push(said.pop() + " " + line.trim());
    else said.push(line);
  verdict.hidden = said.length === 0;
  verdict.classList.toggle("bad", cause !== "nothing");
  put(verdict, "b", said[0]);
  if (said.length < 2) return;
  const more = put(verdict, "details");
  put(more, "summary", "more");
  for (const line of said.slice(1)) put(more, "div", line);
}

function fillLegend() {
  const classes = classNames(), sums = new Float64Array(BINS);
  for (let i = 0; i < bins.length; i++) sums[bins[i]] += columns.lengths[i] * facts.unit;
  sums[B_SPARE] = facts.sums.spare_bytes;
  const entries = classes.map((name, bin) => [name, bin]).concat([["waits for streams", B_PENDING],
    ["lost (free between live blocks)", B_GAP], ["lost: free slots", B_SLOTS], ["lost: rests of slots, tails", B_REST],
    ["idle (whole free pages)", B_WHOLE], ["idle, but usable only there", B_BOUND], ["idle, mapped nowhere", B_SPARE]]);
  const there = entries.filter(([, bin]) => sums[bin] > 0);
  const colour = (bin) => "rgb(" + palette[bin].join(" ") + ")";
  $("legend").replaceChildren(...there.map(([name, bin]) => {
    const button = document.createElement("button"), small = document.createElement("small");
    button.type = "button";
    button.setAttribute("aria-pressed", String(bin === highlighted));
    swatch(button, null, LETTERS[bin]).style.backgroundColor = colour(bin);
    small.textContent = bytesText(sums[bin]) + ", " + share(sums[bin], facts.sums.held_bytes);
    button.append(name, small);
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
