//! The chart: held memory over each trace, a small plot per trace, readable on light and dark
//! pages.
//!
//! Hand-written SVG: a README shows the chart, which needs only paths, texts and two palettes.

use super::report::{Report, TraceReport};
use crate::amounts::percent;
use gruyere_replay::bench::Run;
use std::fmt::Write as _;

const WIDTH: usize = 1200;
const COLUMNS: usize = 4;
const MARGIN: usize = 28;
const GAP: usize = 26;
/// Start of the key, the height of its rows, and its distance from the panels.
const KEY: usize = 92;
const KEY_ROW: usize = 24;
const KEY_FOOT: usize = 18;
/// Of a panel: its title lines, its plot, and its distance from the next row.
const TITLE: usize = 46;
const PLOT: usize = 150;
const FOOT: usize = 34;
const PANEL_WIDTH: usize = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS;
const PANEL_HEIGHT: usize = TITLE + PLOT + FOOT;

/// Colours in CSS classes: `c0` torch, `c1` expandable, then Gruyère and its further
/// configurations.
const STYLE: &str = "\
text{font-family:ui-sans-serif,-apple-system,'Segoe UI',Roboto,'Helvetica \
Neue',Arial,sans-serif;font-size:14px;fill:#57606a}\
.t{font-size:16px;font-weight:600;fill:#1f2328}.h{font-size:23px;font-weight:700;fill:#1f2328}\
.s{font-size:13px}\
.n{font-variant-numeric:tabular-nums;font-weight:600}.bg{fill:#fff;stroke:#d8dee4}\
.g{stroke:#d8dee4;fill:none}\
.l{fill:#d5dce4}.k{fill:none;stroke-width:1.8;stroke-linejoin:round}\
.p{fill:none;stroke:#57606a;stroke-width:1.4;stroke-dasharray:5 4}\
.c0{stroke:#8a94a6}.c1{stroke:#3d7fd6}.c2{stroke:#e08a00;stroke-width:2.6}.c3{stroke:#b0408c}\
.c4{stroke:#2f9e6e}.c5{stroke:#7a5bd0}\
.f0{fill:#6b7687}.f1{fill:#2f6cc0}.f2{fill:#b86e00}.f3{fill:#b0408c}.f4{fill:#2f9e6e}\
.f5{fill:#7a5bd0}\
.b0{fill:#8a94a6}.b1{fill:#3d7fd6}.b2{fill:#e08a00}.b3{fill:#b0408c}.b4{fill:#2f9e6e}\
.b5{fill:#7a5bd0}\
@media(prefers-color-scheme:dark){text{fill:#9198a1}.t,.h{fill:#f0f6fc}.bg{fill:#0d1117;\
stroke:#30363d}.g{stroke:#30363d}.l{fill:#333b46}.p{stroke:#9198a1}\
.c0{stroke:#7d8796}.c1{stroke:#58a0f5}.c2{stroke:#ffb52e}.c3{stroke:#e07fc1}.c4{stroke:#56d39b}\
.c5{stroke:#a78bfa}\
.f0{fill:#9aa4b2}.f1{fill:#79b4ff}.f2{fill:#ffc04d}.f3{fill:#e07fc1}.f4{fill:#56d39b}\
.f5{fill:#a78bfa}\
.b0{fill:#7d8796}.b1{fill:#58a0f5}.b2{fill:#ffb52e}.b3{fill:#e07fc1}.b4{fill:#56d39b}\
.b5{fill:#a78bfa}}";

/// The most figures that fit under a trace's name.
const FIGURES: usize = 4;
/// Height of an allocator's bar with its name.
const LINE: usize = 46;
/// Columns of a curve, the highest value of each: wide enough to show a single peak.
const STEPS: usize = 96;

/// Number of colour classes.
const COLOURS: usize = 6;

/// The SVG text of `report`.
pub fn draw(report: &Report) -> String {
    let (key, key_rows) = key(report);
    let head = KEY + key_rows.saturating_sub(1) * KEY_ROW + KEY_FOOT;
    let place = |index: usize| {
        (MARGIN + index % COLUMNS * (PANEL_WIDTH + GAP), head + index / COLUMNS * PANEL_HEIGHT)
    };
    let (_, means_top) = place(report.traces.len());
    let means_height = report.traces.first().map_or(0, |trace| mean_row(trace.runs.len()));
    let height = means_top + PANEL_HEIGHT.max(means_height);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"{}\">\n\
         <style>{STYLE}</style>\n",
        escape(&summary(report))
    );
    let _ = writeln!(
        svg,
        "<rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"12\"/>",
        WIDTH - 1,
        height - 1
    );
    let _ = writeln!(
        svg,
        "<text class=\"h\" x=\"{MARGIN}\" y=\"40\">Device memory that PyTorch's traffic \
         takes</text>"
    );
    let _ = writeln!(
        svg,
        "<text x=\"{MARGIN}\" y=\"63\">Memory held over each run, and live memory. Under each \
         name: memory held at the peak beyond live memory.{}</text>",
        lags(report)
    );
    svg.push_str(&key);
    for (index, trace) in report.traces.iter().enumerate() {
        let (x, y) = place(index);
        panel(&mut svg, x, y, trace);
    }
    let (x, y) = place(report.traces.len());
    means(&mut svg, x, y, report);
    svg.push_str("</svg>\n");
    svg
}

/// The clock of the picture, in a sentence; empty for a real device, or a device without delay.
fn lags(report: &Report) -> String {
    match report.measured.clocks.first() {
        Some(clock) if clock.lags() && report.device == "stand-in" => {
            format!(" Kernels take {} us.", clock.kernel_ns() / 1000)
        }
        _ => String::new(),
    }
}

/// The key, in as many rows as needed: each allocator's line, live and its peak.
fn key(report: &Report) -> (String, usize) {
    let mut entries: Vec<(String, String)> = Vec::new();
    if let Some(first) = report.traces.first() {
        for (index, run) in first.runs.iter().enumerate() {
            let colour = colour(index, first);
            let line = format!("<path class=\"k c{colour}\" d=\"M0 -4h22\"/>");
            entries.push((line, label(run)));
        }
    }
    let live = "<rect class=\"l\" y=\"-11\" width=\"22\" height=\"13\" rx=\"3\"/>";
    entries.push((live.to_owned(), "live, at its highest".to_owned()));
    entries.push(("<path class=\"p\" d=\"M0 -4h22\"/>".to_owned(), "peak of live".to_owned()));
    let (mut svg, mut x, mut rows) = (String::new(), MARGIN, 1);
    for (mark, words) in entries {
        // For text in the widest of the fonts.
        let width = 30 + words.chars().count() * 37 / 5 + GAP;
        if x > MARGIN && x + width > WIDTH - MARGIN + GAP {
            (x, rows) = (MARGIN, rows + 1);
        }
        let y = KEY + (rows - 1) * KEY_ROW;
        let _ = writeln!(
            svg,
            "<g transform=\"translate({x} {y})\">{mark}<text x=\"30\" y=\"0\">{}</text></g>",
            escape(&words)
        );
        x += width;
    }
    (svg, rows)
}

fn colour(run: usize, trace: &TraceReport) -> usize {
    // Without the models, Gruyère keeps its own colour.
    let skipped = if trace.runs.first().is_some_and(|run| run.conf.is_some()) { 2 } else { 0 };
    (run + skipped) % COLOURS
}

fn panel(svg: &mut String, x: usize, y: usize, trace: &TraceReport) {
    let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
    let _ = writeln!(svg, "<text class=\"t\" x=\"0\" y=\"16\">{}</text>", escape(&trace.trace));
    let mut at = 0;
    for (index, run) in trace.runs.iter().enumerate().take(FIGURES) {
        let colour = colour(index, trace);
        let beyond = match run.completed {
            true => beyond(run.hold_ratio - 1.0),
            false => "out of memory".to_owned(),
        };
        let _ = writeln!(svg, "<text class=\"n f{colour}\" x=\"{at}\" y=\"36\">{beyond}</text>");
        at += 9 * beyond.len() + 16;
    }
    let highest = trace.runs.iter().flat_map(|run| &run.curve).chain(&trace.live_curve).max();
    let top = nice(highest.copied().unwrap_or(1).max(1));
    let _ = writeln!(svg, "<g transform=\"translate(0 {TITLE})\">");
    for part in 0..=2 {
        let line = PLOT * part / 2;
        let _ = writeln!(svg, "<path class=\"g\" d=\"M0 {line}H{PANEL_WIDTH}\"/>");
    }
    let live = highs(&trace.live_curve);
    let _ = writeln!(svg, "<path class=\"l\" d=\"{}V{PLOT}H0Z\"/>", steps(&live, top));
    let _ = writeln!(
        svg,
        "<path class=\"p\" d=\"M0 {:.1}H{PANEL_WIDTH}\"/>",
        height_of(trace.peak_live, top)
    );
    // Gruyère's default comes last, on top.
    let mut runs: Vec<_> = trace.runs.iter().enumerate().collect();
    runs.sort_by_key(|(_, run)| run.conf.as_deref() == Some(""));
    for (index, run) in runs {
        let colour = colour(index, trace);
        let _ =
            writeln!(svg, "<path class=\"k c{colour}\" d=\"{}\"/>", steps(&highs(&run.curve), top));
    }
    let gib = top >> 30;
    let label = if gib > 0 { format!("{gib} GiB") } else { format!("{} MiB", top >> 20) };
    let _ = writeln!(
        svg,
        "<text class=\"s\" x=\"{PANEL_WIDTH}\" y=\"-5\" text-anchor=\"end\">{label}</text>"
    );
    let operations = thousands(trace.operations);
    let _ = writeln!(
        svg,
        "<text class=\"s\" x=\"0\" y=\"{}\">{operations} mallocs and frees</text></g></g>",
        PLOT + 17
    );
}

/// Position of `bytes`, from the upper edge, in a plot that ends at `top`.
fn height_of(bytes: u64, top: u64) -> f64 {
    PLOT as f64 - bytes as f64 / top as f64 * PLOT as f64
}

/// Reduces `curve` to at most [`STEPS`] points, the highest of each part: a peak is as wide as a
/// point, and the order of two curves stays.
fn highs(curve: &[u64]) -> Vec<u64> {
    let parts = curve.chunks(curve.len().div_ceil(STEPS).max(1));
    parts.map(|part| part.iter().copied().max().unwrap_or(0)).collect()
}

/// A path of steps, one for each point of `curve`, without repeated values.
fn steps(curve: &[u64], top: u64) -> String {
    let mut path = String::new();
    let mut last = String::new();
    for (index, &bytes) in curve.iter().enumerate() {
        let y = format!("{:.1}", height_of(bytes, top));
        let x = index as f64 * PANEL_WIDTH as f64 / curve.len() as f64;
        if index == 0 {
            let _ = write!(path, "M0 {y}");
        } else if y != last {
            let _ = write!(path, "H{x:.1}V{y}");
        }
        last = y;
    }
    let _ = write!(path, "H{PANEL_WIDTH}");
    path
}

/// Memory held beyond the peak of live by each allocator, averaged over the traces.
fn means(svg: &mut String, x: usize, y: usize, report: &Report) {
    let Some(first) = report.traces.first() else { return };
    let excess: Vec<f64> = (0..first.runs.len()).map(|index| mean_excess(report, index)).collect();
    let most = excess.iter().copied().fold(0.0, f64::max).max(1e-9);
    let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
    let _ = writeln!(svg, "<text class=\"t\" x=\"0\" y=\"16\">Held beyond live</text>");
    let _ =
        writeln!(svg, "<text class=\"s\" x=\"0\" y=\"36\">at the peak, mean of the traces</text>");
    for (index, run) in first.runs.iter().enumerate() {
        let colour = colour(index, first);
        let row = mean_row(index);
        let width = (excess[index].max(0.0) / most * (PANEL_WIDTH as f64 - 70.0)).max(2.0);
        let _ = writeln!(svg, "<text x=\"0\" y=\"{row}\">{}</text>", escape(&label(run)));
        let _ = writeln!(
            svg,
            "<rect class=\"b{colour}\" x=\"0\" y=\"{}\" width=\"{width:.1}\" height=\"12\" \
             rx=\"3\"/>",
            row + 7
        );
        let _ = writeln!(
            svg,
            "<text class=\"n f{colour}\" x=\"{:.1}\" y=\"{}\">{}</text>",
            width + 8.0,
            row + 18,
            beyond(excess[index])
        );
    }
    svg.push_str("</g>\n");
}

/// A part of the peak of live, in percent with its sign.
fn beyond(part: f64) -> String {
    let sign = if part < 0.0 { "" } else { "+" };
    format!("{sign}{}", percent(part * 100.0))
}

fn mean_row(index: usize) -> usize {
    TITLE + 22 + index * LINE
}

fn mean_excess(report: &Report, index: usize) -> f64 {
    let ratios = report
        .traces
        .iter()
        .filter_map(|trace| trace.runs.get(index))
        .map(|run| run.hold_ratio - 1.0);
    ratios.sum::<f64>() / report.traces.len().max(1) as f64
}

fn label(run: &Run) -> String {
    match run.allocator.as_str() {
        "torch" => "PyTorch, default".to_owned(),
        "expandable" => "PyTorch, expandable segments".to_owned(),
        "gruyere" => "Gruyère".to_owned(),
        other => other.to_owned(),
    }
}

fn summary(report: &Report) -> String {
    let Some(first) = report.traces.first() else { return "No traces".to_owned() };
    let parts = first
        .runs
        .iter()
        .enumerate()
        .map(|(index, run)| format!("{} {}", label(run), beyond(mean_excess(report, index))));
    format!(
        "Memory held beyond live at the peak, mean of the traces: {}",
        parts.collect::<Vec<_>>().join(", ")
    )
}

/// The least of 1, 1.5, 2, 3, 4, 5, 6, 8 and 10 times a power of two GiB (MiB below one) that is at
/// least `bytes`.
fn nice(bytes: u64) -> u64 {
    let unit: u64 = if bytes > 1 << 30 { 1 << 30 } else { 1 << 20 };
    let mut decade = unit;
    loop {
        for tenths in [10, 15, 20, 25, 30, 40, 50, 60, 80, 100] {
            let top = decade / 10 * tenths;
            let top = top.div_ceil(unit) * unit;
            if top >= bytes {
                return top;
            }
        }
        decade = decade.saturating_mul(10);
    }
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_at_round_numbers_that_hold_the_peak() {
        let gib = 1u64 << 30;
        for (bytes, top) in
            [(11 * gib, 15 * gib), (76 * gib, 80 * gib), (gib + 1, 2 * gib), (50 * gib, 50 * gib)]
        {
            assert_eq!(nice(bytes), top);
        }
        assert!(nice(1) >= 1 && nice(u64::MAX / 4) >= u64::MAX / 4);
    }

    #[test]
    fn a_flat_curve_is_one_line() {
        assert_eq!(steps(&[0; 480], 1), format!("M0 {PLOT}.0H{PANEL_WIDTH}"));
    }

    #[test]
    fn a_peak_of_live_is_drawn_as_high_as_it_was_and_wide_enough_to_be_seen() {
        let gib = 1u64 << 30;
        let mut live = vec![gib; 480];
        live[7] = 3 * gib;
        let drawn = highs(&live);
        assert_eq!((drawn.len(), drawn.iter().max()), (STEPS, Some(&(3 * gib))));
        assert!(PANEL_WIDTH as f64 / drawn.len() as f64 > 2.5, "pixels");
        let held: Vec<u64> = live.iter().map(|live| live + 1).collect();
        assert!(highs(&held).iter().zip(&drawn).all(|(held, live)| held > live));
        assert_eq!(highs(&[5, 6]), [5, 6]);
        assert!(highs(&[]).is_empty());
    }

    #[test]
    fn the_key_is_under_the_title_and_has_every_curve() {
        let mut report = crate::bench::tests::report(|_| {});
        let svg = draw(&report);
        let key = svg.find("PyTorch, default</text>").unwrap();
        assert!(svg.find("class=\"h\"").unwrap() < key, "{svg}");
        assert!(key < svg.find(">tiny<").unwrap(), "{svg}");
        assert!(svg.contains("peak of live</text>"), "{svg}");
        // Many settings take more rows, and the panels begin below them.
        let run = report.traces[0].runs[0].clone();
        report.traces[0].runs = vec![run; 12];
        let rows = key_rows(&report);
        assert!(rows > 1, "{rows}");
        let below = KEY + (rows - 1) * KEY_ROW + KEY_FOOT;
        assert!(draw(&report).contains(&format!("<g transform=\"translate({MARGIN} {below})\">")));
    }

    fn key_rows(report: &Report) -> usize {
        key(report).1
    }

    #[test]
    fn names_from_outside_cannot_break_the_picture() {
        assert_eq!(escape("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([thousands(7), thousands(1234), thousands(634037)], ["7", "1,234", "634,037"]);
    }
}
