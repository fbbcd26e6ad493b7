/* The map: rows of cells, by address. A cell is three digits: the line that has most of it, eighths
   that blocks take, eighths that are lost. */
const PENDING = 9, PITCH = 17, HIGH = 13;
let drawMap = () => {};

function mapSection() {
  const { map } = facts;
  if (!map) return;
  const whole = section(`What lies where, ${size(map.row_bytes)} a row`);
  const rows = map.rows.map(text => Array.from(text.match(/.../g) || [], cell =>
    [...cell].map(digit => parseInt(digit, 36))));
  const there = new Set(rows.flat().filter(cell => cell[1]).map(cell => cell[0]));
  // The letters are those of the lines above.
  key(whole, [...(hasKey ? [] : classes), ...(there.has(PENDING) ? [{ name: "freed, waits for streams", colour: "--soft", letter: "w" }] : []),
    { name: "lost (free between live blocks)", colour: "--lost", letter: "!" },
    { name: "idle (whole free pages)", colour: "--panel" }]);
  const canvas = put(whole, "canvas"), words = put(whole, "output", "\u00a0", "soft");
  canvas.id = "map";
  drawMap = () => {
    const wide = canvas.clientWidth, scale = devicePixelRatio || 1, context = canvas.getContext("2d");
    canvas.style.height = rows.length * PITCH + "px";
    canvas.width = wide * scale;
    canvas.height = rows.length * PITCH * scale;
    context.scale(scale, scale);
    const rgb = name => `rgb(${colourOf(name).join(" ")})`;
    const palette = [...Array.from({ length: 9 }, (_, number) => rgb(`--line-${number}`)), rgb("--soft")];
    const [panel, lost] = [rgb("--panel"), rgb("--lost")];
    const letters = [...LETTERS, "o", "w"];
    context.font = "700 10px ui-monospace, 'DejaVu Sans Mono', monospace";
    context.textBaseline = "middle";
    context.textAlign = "center";
    rows.forEach((cells, row) => {
      const x = cell => Math.round(cell * wide / 128), top = row * PITCH;
      let run = 0;
      cells.forEach(([kind, taken, gone], cell) => {
        const from = x(cell), width = x(cell + 1) - from;
        context.fillStyle = panel;
        context.fillRect(from, top, width, HIGH);
        context.fillStyle = palette[kind];
        context.fillRect(from, top + HIGH * (1 - taken / 8), width, HIGH * taken / 8);
        context.fillStyle = lost;
        context.fillRect(from, top + HIGH * (1 - (taken + gone) / 8), width, HIGH * gone / 8);
        // A letter where a line goes on for long enough; of a row of the same, one.
        const next = cells[cell + 1];
        run = taken > 4 ? run + 1 : 0;
        const ends = !next || next[0] !== kind || next[1] <= 4;
        if (!run || !ends) return;
        const middle = (x(cell + 1 - run) + x(cell + 1)) / 2;
        if (x(run) >= 14) {
          context.fillStyle = "#ffffffb3";
          context.fillRect(middle - 4.5, top + 1, 9, HIGH - 2);
          context.fillStyle = "#000";
          context.fillText(letters[kind], middle, top + HIGH / 2 + 0.5);
        }
        run = 0;
      });
    });
  };
  canvas.addEventListener("pointermove", event => {
    const row = Math.floor(event.offsetY / PITCH), cell = Math.floor(event.offsetX / canvas.clientWidth * 128);
    const found = rows[row]?.[cell];
    if (!found) return;
    const [kind, taken, gone] = found;
    const named = kind === PENDING ? "freed, waits for streams" : classes.find(({ number }) => number === kind)?.name;
    words.textContent = `row at ${map.addresses[row]}, + ${size(cell * map.row_bytes / 128)}: `
      + (taken ? `${named}, ${Math.round(taken * 12.5)}% taken` : gone ? "free" : "idle") + (gone ? `, ${Math.round(gone * 12.5)}% lost` : "");
  });
  drawMap();
  addEventListener("resize", () => drawMap());
}
