// The page: what buttons, pointer and keys do, and the start.

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
  const all = rowBytes === 0 || topByte === 0 && rowBytes * visibleRows() >= total();
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
  if (all) showAll(); else { setPitch(); clampTop(topByte); draw(); }
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
    drag = { y: event.offsetY, top: topByte, moved: false };
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
  if ([...$("by").options].some((option) => option.value === wish.get("by"))) $("by").value = by = wish.get("by");
  return () => {
    if (wish.get("view") === "physical") setView("physical");
    if (wish.get("at")) findAddress(wish.get("at"));
  };
}

async function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  // Colours of what nobody asked the program for would all be one.
  if (Object.keys(facts.sites.by_number).length === 0)
    for (const name of ["site", "module", "phase"]) $("by").querySelector("[value=" + name + "]").remove();
  $("by").value = by;
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
  $("subtitle").textContent = "This page could not be drawn: " + error.message + ". It needs a browser from 2023 or later.";
  document.documentElement.dataset.failed = String(error);
});
