//! The chart: reserved memory over each trace, a small picture a trace, readable on light and dark
//! pages.
//!
//! Written by hand as SVG: the chart is a file that a README shows, and it takes no more than
//! paths, texts and two palettes.

use super::report::{Report, TraceReport};
use gruyere_replay::bench::Run;
use std::fmt::Write as _;

const WIDTH: usize = 1200;
const COLUMNS: usize = 4;
const MARGIN: usize = 28;
const GAP: usize = 26;
const HEAD: usize = 84;
/// Of a panel: its title lines, its plot, and what separates it from the next row.
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
.l{fill:#e3e8ee}.k{fill:none;stroke-width:1.8;stroke-linejoin:round}\
.p{fill:none;stroke:#57606a;stroke-width:1.4;stroke-dasharray:5 4}\
.c0{stroke:#8a94a6}.c1{stroke:#3d7fd6}.c2{stroke:#e08a00;stroke-width:2.6}.c3{stroke:#b0408c}\
.c4{stroke:#2f9e6e}.c5{stroke:#7a5bd0}\
.f0{fill:#6b7687}.f1{fill:#2f6cc0}.f2{fill:#b86e00}.f3{fill:#b0408c}.f4{fill:#2f9e6e}\
.f5{fill:#7a5bd0}\
.b0{fill:#8a94a6}.b1{fill:#3d7fd6}.b2{fill:#e08a00}.b3{fill:#b0408c}.b4{fill:#2f9e6e}\
.b5{fill:#7a5bd0}\
@media(prefers-color-scheme:dark){text{fill:#9198a1}.t,.h{fill:#f0f6fc}.bg{fill:#0d1117;\
stroke:#30363d}.g{stroke:#30363d}.l{fill:#262c35}.p{stroke:#9198a1}\
.c0{stroke:#7d8796}.c1{stroke:#58a0f5}.c2{stroke:#ffb52e}.c3{stroke:#e07fc1}.c4{stroke:#56d39b}\
.c5{stroke:#a78bfa}\
.f0{fill:#9aa4b2}.f1{fill:#79b4ff}.f2{fill:#ffc04d}.f3{fill:#e07fc1}.f4{fill:#56d39b}\
.f5{fill:#a78bfa}\
.b0{fill:#7d8796}.b1{fill:#58a0f5}.b2{fill:#ffb52e}.b3{fill:#e07fc1}.b4{fill:#56d39b}\
.b5{fill:#a78bfa}}";

/// Ratios that fit under a trace's name.
const RATIOS: usize = 4;
/// Height of an allocator's line in the legend.
const LINE: usize = 46;

/// Classes of colour that there are.
const COLOURS: usize = 6;

/// The SVG text of `report`.
pub fn draw(report: &Report) -> String {
    let (_, legend_top) = place(report.traces.len());
    let legend_height =
        report.traces.first().map_or(0, |trace| legend_row(trace.runs.len()) + LINE / 2);
    let height = legend_top + PANEL_HEIGHT.max(legend_height);
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
        "<text x=\"{MARGIN}\" y=\"63\">Reserved over each run, against what is live; dashed: the \
         peak of live. Under each name: peak reserved / peak live.</text>"
    );
    for (index, trace) in report.traces.iter().enumerate() {
        let (x, y) = place(index);
        panel(&mut svg, x, y, trace);
    }
    let (x, y) = place(report.traces.len());
    legend(&mut svg, x, y, report);
    svg.push_str("</svg>\n");
    svg
}

fn place(index: usize) -> (usize, usize) {
    (MARGIN + index % COLUMNS * (PANEL_WIDTH + GAP), HEAD + index / COLUMNS * PANEL_HEIGHT)
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
    for (index, run) in trace.runs.iter().enumerate().take(RATIOS) {
        let colour = colour(index, trace);
        let ratio = if run.completed {
            format!("{:.3}", run.hold_ratio)
        } else {
            "out of memory".to_owned()
        };
        let _ = writeln!(svg, "<text class=\"n f{colour}\" x=\"{at}\" y=\"36\">{ratio}</text>");
        at += 10 * ratio.len() + 8;
    }
    let highest = trace.runs.iter().flat_map(|run| &run.curve).chain(&trace.live_curve).max();
    let top = nice(highest.copied().unwrap_or(1).max(1));
    let _ = writeln!(svg, "<g transform=\"translate(0 {TITLE})\">");
    for part in 0..=2 {
        let line = PLOT * part / 2;
        let _ = writeln!(svg, "<path class=\"g\" d=\"M0 {line}H{PANEL_WIDTH}\"/>");
    }
    let _ = writeln!(svg, "<path class=\"l\" d=\"{}V{PLOT}H0Z\"/>", steps(&trace.live_curve, top));
    // Most peaks of live are shorter than a point of the curve is wide: without its line, nobody
    // could see what the ratios compare.
    let _ = writeln!(
        svg,
        "<path class=\"p\" d=\"M0 {:.1}H{PANEL_WIDTH}\"/>",
        height_of(trace.peak_live, top)
    );
    // Gruyère as it comes last, on top.
    let mut runs: Vec<_> = trace.runs.iter().enumerate().collect();
    runs.sort_by_key(|(_, run)| run.conf.as_deref() == Some(""));
    for (index, run) in runs {
        let colour = colour(index, trace);
        let _ = writeln!(svg, "<path class=\"k c{colour}\" d=\"{}\"/>", steps(&run.curve, top));
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

/// Where `bytes` is drawn in a plot that ends at `top`, from the plot's upper edge.
fn height_of(bytes: u64, top: u64) -> f64 {
    PLOT as f64 - bytes as f64 / top as f64 * PLOT as f64
}

/// A path of steps, a point of `curve` each, with what does not move left out.
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

/// The names of the curves, and how much more than the peak of live each allocator reserves,
/// averaged over the traces.
fn legend(svg: &mut String, x: usize, y: usize, report: &Report) {
    let Some(first) = report.traces.first() else { return };
    let excess: Vec<f64> = (0..first.runs.len()).map(|index| mean_excess(report, index)).collect();
    let most = excess.iter().copied().fold(0.0, f64::max).max(1e-9);
    let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
    let _ = writeln!(svg, "<text class=\"t\" x=\"0\" y=\"16\">Reserved beyond live</text>");
    let _ =
        writeln!(svg, "<text class=\"s\" x=\"0\" y=\"36\">at the peak, mean of the traces</text>");
    for (index, run) in first.runs.iter().enumerate() {
        let colour = colour(index, first);
        let row = legend_row(index);
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
            "<text class=\"n f{colour}\" x=\"{:.1}\" y=\"{}\">{:+.1}%</text>",
            width + 8.0,
            row + 18,
            excess[index] * 100.0
        );
    }
    let row = legend_row(first.runs.len());
    let _ = writeln!(
        svg,
        "<rect class=\"l\" x=\"0\" y=\"{}\" width=\"22\" height=\"12\" rx=\"3\"/>",
        row - 10
    );
    let _ = writeln!(svg, "<text x=\"30\" y=\"{row}\">live</text>");
    let _ = writeln!(svg, "<path class=\"p\" d=\"M84 {}h22\"/>", row - 4);
    let _ = writeln!(svg, "<text x=\"114\" y=\"{row}\">its peak</text></g>");
}

fn legend_row(index: usize) -> usize {
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
    let parts =
        first.runs.iter().enumerate().map(|(index, run)| {
            format!("{} {:+.1}%", label(run), mean_excess(report, index) * 100.0)
        });
    format!(
        "Memory reserved beyond live at the peak, mean of the traces: {}",
        parts.collect::<Vec<_>>().join(", ")
    )
}

/// The least of 1, 1.5, 2, 3, 4, 5, 6, 8 and 10 times a power of two GiB (MiB below one) that holds
/// `bytes`.
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
    fn names_from_outside_cannot_break_the_picture() {
        assert_eq!(escape("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([thousands(7), thousands(1234), thousands(634037)], ["7", "1,234", "634,037"]);
    }
}
