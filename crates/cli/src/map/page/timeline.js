// The timeline of the run.

/** Seconds in few digits. */
const secondsText = (seconds) => seconds < 1 ? Math.round(seconds * 1000) + " ms" : seconds < 120 ? seconds.toFixed(seconds < 10 ? 1 : 0) + " s" :
  seconds < 7200 ? Math.round(seconds / 60) + " min" : (seconds / 3600).toFixed(1) + " h";

function drawTimeline(hover = null) {
  const { time, step, liveLow, liveHigh, reserved } = facts.timeline;
  if (time.length < 2) return;
  const canvas = $("timeline"), context = canvas.getContext("2d");
  const wide = canvas.clientWidth, high = canvas.clientHeight;
  canvas.width = wide * scale;
  canvas.height = high * scale;
  context.scale(scale, scale);
  const colour = paint;
  const first = time[0], span = Math.max(1e-6, time[time.length - 1] - first);
  const most = Math.max(...reserved, ...liveHigh, 1) * 1.06;
  const left = GUTTER, right = wide - 12, bottom = high - 32;
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
  let labelEnd = left;
  marks.forEach((i, n) => {
    if (n % every) return;
    const at = x(time[i]), text = String(step[i]);
    context.strokeStyle = colour("--line");
    context.beginPath(); context.moveTo(at, 4); context.lineTo(at, bottom); context.stroke();
    if (at > labelEnd + 6 && at + context.measureText(text).width < wide) {
      context.fillStyle = colour("--soft");
      context.fillText(text, at, bottom + 10);
      labelEnd = at + context.measureText(text).width;
    }
  });
  context.fillStyle = colour("--soft");
  if (marks.length) context.fillText("steps", 6, bottom + 10);
  context.fillText("time", 6, high - 8);
  const ticks = Math.max(1, Math.min(6, Math.floor((right - left) / 110)));
  for (let n = 0; n <= ticks; n++) {
    const text = n === ticks ? "the end" : "-" + secondsText(span * (1 - n / ticks) / 1000), at = left + n / ticks * (right - left);
    context.fillText(text, n === ticks ? right - context.measureText(text).width : at, high - 8);
  }
  // Live: the band between its lows and its highs.
  context.beginPath();
  time.forEach((t, i) => context.lineTo(x(t), y(liveHigh[i])));
  context.lineTo(right, bottom); context.lineTo(left, bottom);
  context.fillStyle = colour("--live-line");
  context.globalAlpha = 0.22;
  context.fill();
  context.globalAlpha = 1;
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
  // Narrow, what is said goes on in a second line.
  const say = (text, name, at) => {
    const cut = text.indexOf(": ") + 1;
    const parts = cut && at + context.measureText(text).width > wide ? [text.slice(0, cut), text.slice(cut + 1)] : [text];
    parts.forEach((part, n) => {
      context.fillStyle = colour("--paper");
      context.fillRect(at - 3, 4 + 16 * n, context.measureText(part).width + 6, 16);
      context.fillStyle = colour(name);
      context.fillText(part, at, 12 + 16 * n);
    });
  };
  let at = left + 8;
  if (hover === null) {
    say("live (highs, lows)", "--live-line", at);
    say("held", "--reserved-line", at + 112);
  } else {
    let i = indexAt(time, first + (hover - left) / (right - left) * span);
    i = Math.max(0, Math.min(time.length - 1, i));
    context.strokeStyle = colour("--mark");
    context.lineWidth = 1;
    context.beginPath(); context.moveTo(x(time[i]), 0); context.lineTo(x(time[i]), bottom); context.stroke();
    say("step " + step[i] + ", " + ((time[time.length - 1] - time[i]) / 1000).toFixed(1) + " s before the end: live " + bytesText(liveLow[i]) + " to " +
      bytesText(liveHigh[i]) + ", held " + bytesText(reserved[i]), "--ink", at);
  }
}
