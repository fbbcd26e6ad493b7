const facts = JSON.parse(document.getElementById("facts").textContent);
const { device, lines } = facts;
const LETTERS = "ABCDEFGH", OTHERS = 8;
const share = (part, whole) => whole ? (100 * part / whole).toFixed(part < whole / 100 ? 1 : 0) + "%" : "-";
const blocks = count => count === 1 ? "1 block" : `${count} blocks`;
/* Why a picture begins where it does. */
const whereFrom = course => new Set(course.steps).size > 1 ? "it begins with the first step"
  : "it begins where live memory begins to rise";
const amount = name => name.replace(/^blocks of (\d+) B$/, (_, bytes) => `blocks of ${size(+bytes)}`);

/* What is drawn of each line: its name, colour and letter; the others are the last. */
const classes = lines.map((line, number) => ({
  name: amount(line.name), colour: `--line-${number}`, letter: LETTERS[number], number,
}));
const rest = facts.other_lines;
if (rest.count) classes.push({
  name: rest.count === 1 ? "1 other" : `${rest.count} others`, colour: `--line-${OTHERS}`, letter: "o",
  number: OTHERS,
});

function seconds(before) {
  const of = Math.abs(before);
  if (of === 0) return "the end";
  if (of < 0.001) return Math.ceil(of * 1e6) + " us";
  if (of < 1) return (of * 1000).toFixed(of < 0.01 ? 1 : 0) + " ms";
  if (of < 120) return of.toFixed(of < 10 ? 1 : 0) + " s";
  return of < 7200 ? Math.round(of / 60) + " min" : (of / 3600).toFixed(1) + " h";
}

/* Where steps begin, where they are told and are not too many; else times. */
function marksOf(course, at) {
  const found = [];
  course.steps.forEach((step, part) => {
    if (part && step !== course.steps[part - 1]) found.push({ at: at[part], text: `step ${step}` });
  });
  const times = [0.25, 0.5, 0.75].map(place => {
    let part = 0;
    while (part < at.length - 2 && at[part + 1] <= place) part++;
    const inside = (place - at[part]) / (at[part + 1] - at[part] || 1);
    const edge = course.edges[part] + inside * (course.edges[part + 1] - course.edges[part]);
    return { at: place, text: `-${seconds(edge)}` };
  });
  const wanted = found.length ? found : times;
  // Text must not run into text.
  const room = Math.max(4, Math.floor(document.querySelector("main").clientWidth / 90));
  const marks = wanted.filter((_, number) => number % Math.ceil(wanted.length / room) === 0);
  let free = 0;
  return marks.filter(mark => {
    const fits = mark.at >= free && mark.at < 0.93;
    if (fits) free = mark.at + 1 / room;
    return fits;
  });
}

/* `even`: each part is as wide as any other. The key stands above the first that is drawn. */
let hasKey = false;
function drawCourse(title, course, said, even) {
  if (!course) return;
  const whole = section(title), span = -course.edges[0], parts = course.high.length;
  const at = course.edges.map((edge, part) => even ? part / parts : span > 0 ? 1 + edge / span : 0);
  const isFirst = !hasKey, known = course.known_from || 0;
  if (isFirst) key(whole, [...classes.map(({ name, colour, letter, number }) =>
    ({ name, colour, letter, note: size(number === OTHERS ? rest.bytes : lines[number].bytes) })),
  { name: "freed before the end", colour: "--freed", kind: "hatched" },
  ...(known ? [{ name: "live, lines not known", colour: "--unknown" }] : [])]);
  hasKey = true;
  layered(whole, {
    title, edges: at, rest: course.high, marks: marksOf(course, at),
    line: course.held.length ? course.held : null,
    layers: [...classes.map(({ name, colour, letter, number }) =>
      ({ name, colour, letter, values: course.layers[number] })),
    ...(known ? [{ name: "live", colour: "--unknown",
      values: course.high.map((bytes, part) => part < known ? bytes : 0) }] : [])],
    // What stands below the first picture need not stand below the second too.
    isQuiet: !isFirst,
    say: part => {
      const parts = classes.map(({ name, number }) => [name, course.layers[number][part]])
        .filter(entry => entry[1]).sort((one, other) => other[1] - one[1]).slice(0, 3);
      const when = seconds(course.edges[part + 1]);
      const isEnd = when === "the end";
      return [`${isEnd ? "At the end" : when + " before the end"}, step ${course.steps[part]}: live `
        + (isEnd ? size(device.live) : `up to ${size(course.high[part])}`), ...parts.map(([name, bytes]) => `${name} ${size(bytes)}`)].join("; ");
    },
  });
  const axis = document.createElement("div");
  axis.className = "axis soft";
  put(axis, "span", `${seconds(span)} before`);
  put(axis, "span", "the end");
  whole.querySelector(".chart").after(axis);
  const left = course.left_out > 0
    ? ` The ${seconds(course.left_out)} before it are left out: ${whereFrom(course)}.` : "";
  const grey = known ? " Grey: live, but the record does not know from which lines that long ago." : "";
  put(whole, "p", said + grey + left, "soft");
}

/* Lines of source, without the indentation that they share; a long one goes on below its own text. */
function drawSource(parent, { path, first, line, lines: text }) {
  const indents = text.filter(words => words.trim()).map(words => words.search(/\S/));
  const shared = Math.min(...indents, 160);
  text.forEach((words, at) => {
    const row = put(parent, "span", null, first + at === line ? "hot" : "");
    put(row, "i", String(first + at));
    const indent = Math.max(words.search(/\S/) - shared, 0);
    put(row, "span", words.trim()).style.paddingLeft = indent + 2 + "ch";
  });
  parent.title = path;
}

function drawLine(parent, line, number) {
  const { name, colour, letter } = classes[number];
  const whole = put(parent, "div", null, "line"), head = put(whole, "div", null, "name");
  swatch(head, colour, letter);
  put(head, "code", name);
  put(head, "b", size(line.bytes));
  whole.append(stack([{ name, colour, bytes: line.bytes }], lines[0].bytes));
  const grows = line.growth ? `; grows by ${size(line.growth.bytes_a_step)} a step since step ${line.growth.since_step}` : "";
  put(whole, "div", `${share(line.bytes, device.live)} of what is live, ${blocks(line.blocks)}${grows}`,
    line.growth ? "" : "soft");
  if (line.source) {
    const text = put(whole, "pre");
    drawSource(text, line.source);
  }
  if (line.called) {
    put(whole, "div", `called from ${line.called.name}`, "soft");
    if (line.called.source) drawSource(put(whole, "pre"), line.called.source);
  }
  if (line.stack.length > 1) {
    const more = put(whole, "details");
    put(more, "summary", "stack");
    put(more, "pre", line.stack.join("\n"));
  }
}

const { process } = facts;
const heading = facts.program + (facts.ran_out ? " ran out of memory" : "");
document.getElementById("command").textContent = heading;
document.title = `gruyere: ${heading}`;
const verdict = document.getElementById("verdict"), words = [];
// A line that goes on where the one before it was cut begins with two blanks.
for (const line of facts.conclusion?.lines || [])
  if (line.startsWith("  ") && words.length) words.push(`${words.pop()} ${line.trim()}`);
  else words.push(line);
// What stands out is one sentence.
const [first, ...others] = (words[0] || "Nothing is concluded.").split(/(?<=[^.]\.) (?=[A-Z])/);
put(verdict, "b", first);
for (const said of [...others, ...words.slice(1)]) put(verdict, "div", said);
verdict.classList.toggle("bad", Boolean(facts.refused) || facts.conclusion?.cause !== "nothing");
document.getElementById("said").textContent = `${facts.said} Process ${process.pid} (${facts.command})`
  + `${process.rank == null ? "" : `, rank ${process.rank}`} on ${process.host}, device ${device.number} `
  + `${device.name}, step ${device.step}, gruyere ${process.gruyere}.`;
listenToTheme(() => drawMap());

const figures = put(document.querySelector("main"), "div");
figures.id = "figures";
const shown = [
  ...(facts.refused ? [["asked for", facts.refused.asked]] : []), ["live", device.live],
  ["peak of live", device.live_peak], ["held", device.held],
  ["lost (free between live blocks)", device.lost], ["idle (whole free pages)", device.idle], ["device", device.total],
  ...(device.limit && device.limit < device.total ? [["limit", device.limit]] : []),
  ...(facts.refused && facts.refused.others ? [["held by others", facts.refused.others]] : [])];
for (const [name, bytes] of shown) put(put(figures, "span", name + " "), "b", size(bytes));
for (const other of facts.others) put(figures, "span",
  `device ${other.number}: live ${size(other.live)}, held ${size(other.held)}`);

const of = facts.knows_lines ? "by line of the program" : "by size of block";
drawCourse(`Live over the run, ${of}`, facts.course,
  "Colour: memory still live at the end. Hatched: memory freed before. Dashed: held from the driver."
  + (new Set(facts.course?.steps).size > 1 ? " Older parts are approximate within a step." : ""));
drawCourse(`The last ${seconds(facts.latest ? facts.latest.edges[0] : 0)}, malloc by malloc`, facts.latest,
  "Colour: memory still live at the end. Hatched: memory freed before. Each malloc or free has the same width.", true);
if (!facts.course && !facts.latest) put(section("Over the run"), "p",
  "No timeline is known: the record is off (`record:on`), or nothing was allocated for long enough.", "soft");

const held = section(`Live at the end, ${of}`);
lines.forEach((line, number) => drawLine(held, line, number));
if (rest.count) put(held, "p", `${classes[classes.length - 1].name}: ${size(rest.bytes)} in ${blocks(rest.blocks)}.`, "soft");
if (!facts.has_lines) ; // Lines are those of Python.
else if (!facts.knows_lines) put(held, "p", "No lines of the program are known; `blame:large` in GRUYERE_CONF keeps them, "
  + "under python -m gruyere.", "soft");
else if (!lines.some(line => line.source)) put(held, "p", "No source is shown: its files are not here, or were changed "
  + "since the run began.", "soft");

table(section("Where the held memory is"), ["what", "bytes ", "of what is held ", ""],
  device.parts.map(({ name, bytes }) => [name, size(bytes), share(bytes, device.held),
    stack([{ name, colour: name === "live" ? "--line-0" : "--line-8", bytes }], device.held)]));
mapSection();
document.documentElement.dataset.ready = document.documentElement.dataset.complete = String(Math.round(performance.now()));
