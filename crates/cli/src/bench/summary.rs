//! Summary of the bench: the verdict, and README's table. (`cargo xtask figures` writes README's
//! from bench.json; a test keeps the cells of the two equal.)

use super::report::{Report, TraceReport};
use crate::amounts::percent;
use crate::wrap::wrap;
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle,
};
use gruyere_record::cut;
use gruyere_record::watch::median;
use gruyere_replay::bench::Run;
use gruyere_replay::clock::Clock;
use std::fmt::Write as _;
use std::ops::Range;

/// Width of the text.
pub const COLUMNS: usize = 80;
/// The most traces named in a sentence.
const MOST_NAMED: usize = 5;
/// The most characters of a setting in a heading.
const MOST_SETTING: usize = 20;

/// A compared figure: less is better.
struct Figure {
    title: &'static str,
    /// Excess over the least possible value, in percent; `None` if not measured.
    beyond: fn(&Run) -> Option<f64>,
    /// Text of a cell without a figure.
    without: &'static str,
}

const HELD: Figure = Figure {
    title: "Held at the peak, beyond live memory",
    beyond: |run| run.completed.then_some((run.hold_ratio - 1.0) * 100.0),
    without: "out of memory",
};
const FIT: Figure = Figure {
    title: "The smallest device that completes, beyond live memory",
    beyond: |run| run.fit_ratio.map(|ratio| (ratio - 1.0) * 100.0),
    without: "none",
};
const TIME: Figure = Figure {
    title: "The device's time, beyond that with an allocator that costs nothing",
    beyond: |run| {
        let time = run.timeline.as_ref().filter(|time| time.perfect_end_ns > 0)?;
        Some((time.end_ratio() - 1.0) * 100.0)
    },
    without: "-",
};

/// The allocator that holds the least and the one that completes on the smallest device, trace by
/// trace, and any trouble: a few lines.
pub fn verdict(report: &Report) -> String {
    let mut said = Vec::new();
    for (traces, kind) in [(&report.traces, "traces"), (&report.small, "small programs")] {
        let least = "holds the least";
        said.extend(ours_and_theirs(traces, kind, &HELD, least, "Less is held by"));
        if report.measured.fit {
            let least = "completes on the smallest device";
            said.extend(ours_and_theirs(traces, kind, &FIT, least, "A smaller one is enough for"));
        }
    }
    if report.measured.timeline {
        said.extend(ranges(report, &TIME, "Allocation delays the end of the device's work by"));
    }
    let faults: usize = report.runs().map(|(_, run)| run.fault_count).sum();
    let short = report.runs().filter(|(_, run)| !run.completed).count();
    said.push(format!(
        "{}; {}.",
        match faults {
            0 => "No faults".to_owned(),
            1 => "1 fault".to_owned(),
            faults => format!("{faults} faults"),
        },
        match short {
            0 => "every run completed".to_owned(),
            1 => "1 run did not complete".to_owned(),
            short => format!("{short} runs did not complete"),
        }
    ));
    said.iter()
        .flat_map(|line| wrap(line, COLUMNS, "  "))
        .fold(String::new(), |text, line| text + &line + "\n")
}

/// A figure as in the full table, to a thousandth: smaller differences do not count.
fn shown(figure: &Figure, run: &Run) -> Option<i64> {
    (figure.beyond)(run).map(|beyond| (beyond * 10.0).round() as i64)
}

/// On how many of `traces`, which are of a `kind`, ours has the least, and which allocator has less
/// on which trace; `None` without another allocator.
fn ours_and_theirs(
    all: &[TraceReport],
    kind: &str,
    figure: &Figure,
    least: &str,
    less: &str,
) -> Vec<String> {
    let shown = |run: &Run| shown(figure, run);
    let (mut traces, mut won) = (0, 0);
    let mut others: Vec<(String, Vec<(i64, String)>)> = Vec::new();
    for trace in all {
        let Some(run) = trace.runs.iter().find(|run| run.conf.as_deref() == Some("")) else {
            continue;
        };
        let models = trace.runs.iter().filter(|run| run.conf.is_none());
        let models: Vec<(&Run, i64)> = models.filter_map(|run| Some((run, shown(run)?))).collect();
        if models.is_empty() {
            continue;
        }
        traces += 1;
        // A run that did not complete has no figure, and lost.
        let ours = shown(run).unwrap_or(i64::MAX);
        let better: Vec<&Run> =
            models.iter().filter(|(_, theirs)| *theirs < ours).map(|(run, _)| *run).collect();
        won += u32::from(better.is_empty());
        for other in better {
            let behind = ours.saturating_sub(shown(other).unwrap_or(ours));
            let on = format!("{} ({})", trace.trace, against(figure, other, run));
            let name = name(other);
            match others.iter_mut().find(|(known, _)| *known == name) {
                Some((_, traces)) => traces.push((behind, on)),
                None => others.push((name, vec![(behind, on)])),
            }
        }
    }
    if traces == 0 {
        return Vec::new();
    }
    let mut said = vec![match (traces, won) {
        (1, 1) => format!("Gruyère {least}."),
        _ => format!("Gruyère {least} on {won} of {traces} {kind}."),
    }];
    said.extend(
        others.into_iter().map(|(name, on)| format!("{less} {name} on {}.", listed(&worst(on)))),
    );
    said
}

/// A run's figure against another's, with a further digit if they would look the same.
fn against(figure: &Figure, one: &Run, other: &Run) -> String {
    let told = |cell: fn(f64) -> String| {
        [one, other].map(|run| (figure.beyond)(run).map_or(figure.without.to_owned(), cell))
    };
    let [one, other] = match told(signed) {
        [one, other] if one == other => told(|beyond| format!("{beyond:+.1}%")),
        differ => differ,
    };
    format!("{one} against {other}")
}

/// The worst of the list, in the order of the traces, and the number of others.
fn worst(mut on: Vec<(i64, String)>) -> Vec<String> {
    let mut behind: Vec<i64> = on.iter().map(|(behind, _)| *behind).collect();
    behind.sort_unstable_by(|one, other| other.cmp(one));
    let others = on.len().saturating_sub(MOST_NAMED);
    // Naming a single other is as short as counting it.
    if others > 1 {
        let least = behind[MOST_NAMED - 1];
        let mut left = MOST_NAMED;
        on.retain(|(behind, _)| {
            let named = *behind >= least && left > 0;
            left -= usize::from(named);
            named
        });
    }
    let mut named: Vec<String> = on.into_iter().map(|(_, on)| on).collect();
    if others > 1 {
        named.push(format!("{others} others"));
    }
    named
}

/// Range of the figure's excess over the least possible value, over all traces: ours, then the
/// models'.
fn ranges(report: &Report, figure: &Figure, what: &str) -> Option<String> {
    let is_ours = |run: &Run| run.conf.as_deref() == Some("");
    let mut shown: Vec<&Run> = report.traces.first()?.runs.iter().collect();
    shown.retain(|run| is_ours(run) || run.conf.is_none());
    shown.sort_by_key(|run| !is_ours(run));
    let range = |one: &&Run| {
        let runs = report.runs().filter(|(_, run)| run.allocator == one.allocator);
        let found: Vec<f64> = runs.filter_map(|(_, run)| (figure.beyond)(run)).collect();
        let least = found.iter().copied().reduce(f64::min)?;
        let most = found.iter().copied().reduce(f64::max)?;
        let range = match found.len() {
            1 => percent(most),
            _ => format!("{} to {}", percent(least), percent(most)),
        };
        Some(format!("{range} with {}", name(one)))
    };
    let told: Vec<String> = shown.iter().filter_map(range).collect();
    (!told.is_empty()).then(|| format!("{what} {}.", listed(&told)))
}

/// An allocator in a sentence.
fn name(run: &Run) -> String {
    match run.allocator.as_str() {
        "torch" => "torch's default allocator".to_owned(),
        "expandable" => "torch's expandable segments".to_owned(),
        "gruyere" => "Gruyère".to_owned(),
        name => name.to_owned(),
    }
}

/// `a, b and c`.
fn listed(words: &[String]) -> String {
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

/// An allocator's name in README, in the lines of a heading.
fn heading(run: &Run) -> Vec<String> {
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    match (run.allocator.as_str(), run.conf.as_deref()) {
        ("torch", _) => words(&["torch,", "default"]),
        ("expandable", _) => words(&["torch, expandable", "segments"]),
        (_, Some("")) => words(&["Gruyère"]),
        (_, Some(conf)) => {
            let settings = conf.split_inclusive(',').map(|setting| cut(setting, MOST_SETTING));
            words(&["Gruyère"]).into_iter().chain(settings).collect()
        }
        (other, None) => words(&[other]),
    }
}

fn signed(beyond: f64) -> String {
    let sign = if beyond < 0.0 { "" } else { "+" };
    format!("{sign}{}", percent(beyond))
}

/// The tables of the measurements.
pub fn draw(report: &Report) -> String {
    let mut text = String::new();
    let clocks = report.measured.clocks.iter().copied();
    for clock in clocks.filter(|_| report.device == "stand-in") {
        let [large, small] = [&report.traces, &report.small].map(|traces| on_clock(traces, clock));
        let title = format!("{}; {}", HELD.title, on(clock, report));
        text += &tables((&large, &small), &HELD, &title);
    }
    if text.is_empty() {
        text += &tables((&report.traces, &report.small), &HELD, HELD.title);
    }
    if report.measured.fit {
        text += &tables((&report.traces, &report.small), &FIT, FIT.title);
    }
    if report.measured.timeline {
        text += &tables((&report.traces, &[]), &TIME, TIME.title);
        let _ = writeln!(text, "\nPrices of driver calls: {}", report.measured.prices);
    }
    text
}

/// A clock in a heading.
pub fn on(clock: Clock, report: &Report) -> String {
    let has_kernels = report.traces.iter().chain(&report.small).any(|trace| trace.has_kernels);
    match clock.kernel_ns() / 1000 {
        // As `gruyere record` writes it.
        _ if !has_kernels => "no kernels in the trace, a device that is done at once".to_owned(),
        0 => "a device that is done at once".to_owned(),
        us => format!("kernels take {us} us"),
    }
}

/// The same traces with the held memory on `clock`.
fn on_clock(traces: &[TraceReport], clock: Clock) -> Vec<TraceReport> {
    let mut traces = traces.to_vec();
    for run in traces.iter_mut().flat_map(|trace| &mut trace.runs) {
        if let Some(lag) = run.clocks.iter().find(|lag| lag.clock == clock) {
            (run.hold_ratio, run.completed) = (lag.hold_ratio, lag.completed);
        }
    }
    traces
}

/// A figure of all traces, and of the small programs if there are any.
fn tables(
    (traces, small): (&[TraceReport], &[TraceReport]),
    figure: &Figure,
    title: &str,
) -> String {
    let mut text = format!("\n{title}\n{}", split(traces, figure, false));
    if !small.is_empty() {
        let _ = write!(text, "\nSmall programs: {title}\n{}", split(small, figure, true));
    }
    text
}

/// A figure of all allocators: in a single table, or in several if they are too wide for a line.
fn split(traces: &[TraceReport], figure: &Figure, with_summary: bool) -> String {
    let mut text = String::new();
    let all = traces.first().map_or(0, |trace| trace.runs.len());
    let mut from = 0;
    while from < all {
        let widths = |to| {
            let table = table(traces, figure, from..to, with_summary);
            let width = table.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            (table, width)
        };
        let mut to = from + 1;
        let mut fits = widths(to).0;
        while to < all {
            let (wider, width) = widths(to + 1);
            if width > COLUMNS {
                break;
            }
            (fits, to) = (wider, to + 1);
        }
        text += &fits;
        from = to;
    }
    text
}

/// The rows of `traces` for the allocators in `columns`; below a rule, their summary.
fn table(
    traces: &[TraceReport],
    figure: &Figure,
    columns: Range<usize>,
    with_summary: bool,
) -> String {
    let mut table = Table::new();
    let rule = LineStyle::none().fill('─').junction('─');
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Disabled);
    let runs = |trace: &TraceReport| trace.runs.get(columns.clone()).unwrap_or_default().to_vec();
    let headings = traces.first().map(runs).unwrap_or_default();
    let headings = headings.iter().map(|run| heading(run).join("\n"));
    let first = ["trace", "peak live"].map(str::to_owned);
    table.set_header(first.into_iter().chain(headings));
    for trace in traces {
        let cell = |run: &Run| (figure.beyond)(run).map_or(figure.without.to_owned(), signed);
        let cells = runs(trace).iter().map(cell).collect::<Vec<_>>();
        table.add_row([trace.trace.clone(), live(trace.peak_live)].into_iter().chain(cells));
    }
    if with_summary {
        for (name, cells) in come_to(traces, figure, columns) {
            table.add_row([name, String::new()].into_iter().chain(cells));
        }
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(ColumnConstraint::ContentWidth);
        let right = if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
        column.set_cell_alignment(right);
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    let mut text = String::new();
    let rule = lines.iter().position(|line| line.starts_with('─'));
    for (index, line) in lines.iter().enumerate() {
        text += line;
        text.push('\n');
        if let Some(rule) = rule
            && with_summary
            && index == rule + traces.len()
        {
            text += &lines[rule];
            text.push('\n');
        }
    }
    text
}

/// Bytes in GiB, or MiB below one.
fn live(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{:.0} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

/// Summary of the rows of `traces`: the most, the median, and the number of traces on which an
/// allocator is above each of torch's.
fn come_to(
    traces: &[TraceReport],
    figure: &Figure,
    columns: Range<usize>,
) -> Vec<(String, Vec<String>)> {
    let all = |column: usize| -> Option<Vec<f64>> {
        traces.iter().map(|trace| (figure.beyond)(trace.runs.get(column)?)).collect()
    };
    let row = |name: &str, of: &dyn Fn(&mut [f64]) -> Option<f64>| {
        let cell = |column| {
            let value = all(column).as_deref_mut().and_then(of);
            value.map_or(figure.without.to_owned(), signed)
        };
        (name.to_owned(), columns.clone().map(cell).collect::<Vec<_>>())
    };
    let mut rows = vec![
        row("worst", &|values| values.iter().copied().max_by(f64::total_cmp)),
        row("median", &median),
    ];
    for (other, name) in [("torch", "above torch, default"), ("expandable", "above expandable")] {
        let above = |trace: &TraceReport, column: usize| {
            let other = trace.runs.iter().find(|run| run.allocator == other)?;
            let run = trace.runs.get(column)?;
            let most = |run| shown(figure, run).unwrap_or(i64::MAX);
            Some(most(run) > most(other))
        };
        let cell = |column: usize| {
            let first = traces.first().and_then(|trace| trace.runs.get(column));
            if first.is_none_or(|run| run.allocator == other) {
                return String::new();
            }
            let above: Vec<bool> = traces.iter().filter_map(|trace| above(trace, column)).collect();
            format!("{} of {}", above.iter().filter(|&&above| above).count(), above.len())
        };
        rows.push((name.to_owned(), columns.clone().map(cell).collect()));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::report;

    /// Two traces with torch, expandable segments, Gruyère and `confs` more of it.
    fn two(held: [[f64; 3]; 2], confs: usize) -> Report {
        let mut report = report(|_| {});
        let run = report.traces[0].runs[0].clone();
        let trace = |held: [f64; 3], name: &str| {
            let named = [("torch", None), ("expandable", None), ("gruyere", Some(String::new()))];
            let more = (0..confs).map(|n| {
                let conf =
                    format!("slack:0.{n}%,waits:budget,dump_dir:/a/very/long/path/somewhere");
                Run {
                    allocator: format!("gruyere {conf}"),
                    conf: Some(conf),
                    hold_ratio: 1.5,
                    ..run.clone()
                }
            });
            let runs = named.into_iter().zip(held).map(|((allocator, conf), hold_ratio)| Run {
                allocator: allocator.to_owned(),
                conf,
                hold_ratio,
                ..run.clone()
            });
            TraceReport {
                trace: name.to_owned(),
                has_kernels: true,
                operations: 2,
                streams: 1,
                peak_live: 5 << 30,
                live_curve: Vec::new(),
                runs: runs.chain(more).collect(),
            }
        };
        report.traces = vec![trace(held[0], "fsdp"), trace(held[1], "gpt2xl_accum")];
        report
    }

    #[test]
    fn the_verdict_names_the_trace_on_which_another_wins() {
        let told = verdict(&two([[1.5, 1.2, 1.004], [1.03, 1.0058, 1.007]], 0));
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines[0], "Gruyère holds the least on 1 of 2 traces.");
        assert_eq!(
            lines[1..3].join("\n"),
            "Less is held by torch's expandable segments on gpt2xl_accum (+0.6% against\n  +0.7%)."
        );
        assert_eq!(lines[3..], ["No faults; every run completed."]);
        let all = verdict(&two([[1.5, 1.2, 1.004], [1.03, 1.0078, 1.0076]], 0));
        assert!(all.starts_with("Gruyère holds the least on 2 of 2 traces.\nNo faults"), "{all}");
    }

    #[test]
    fn the_small_programs_have_a_verdict_and_a_table_with_worst_and_median() {
        let mut both = two([[1.5, 1.2, 1.004], [1.03, 1.0058, 1.007]], 0);
        let mut small = two([[1.04, 1.03, 1.08], [1.5, 1.2, 1.1]], 0).traces;
        let more = two([[1.3, 1.12, 1.128], [1.3, 1.12, 1.128]], 0).traces;
        small.push(more.into_iter().next().unwrap());
        for (trace, name) in small.iter_mut().zip(["resnet50", "gnn", "unet"]) {
            name.clone_into(&mut trace.trace);
        }
        both.small = small;
        let told = verdict(&both).replace("\n  ", " ");
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines[0], "Gruyère holds the least on 1 of 2 traces.");
        assert_eq!(lines[2], "Gruyère holds the least on 1 of 3 small programs.");
        let less = "Less is held by torch's default allocator on resnet50 (+4.0% against +8.0%).";
        assert_eq!(lines[3], less);
        both.small[0].runs[0].hold_ratio = 1.12;
        both.small[0].runs[2].hold_ratio = 1.123;
        let told = verdict(&both).replace("\n  ", " ");
        assert!(told.contains("resnet50 (+12.0% against +12.3%)"), "{told}");
        both.small[0].runs[0].hold_ratio = 1.04;
        both.small[0].runs[2].hold_ratio = 1.08;
        both.small[0].peak_live = 300 << 20;
        let tables = draw(&both);
        let row = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = tables.lines().map(row).collect();
        for wanted in [
            "resnet50 300 MiB +4.0% +3.0% +8.0%",
            "unet 5.00 GiB +30% +12% +13%",
            "worst +50% +20% +13%",
            "median +30% +12% +10%",
            "above torch, default 0 of 3 1 of 3",
            "above expandable 3 of 3 2 of 3",
        ] {
            assert!(rows.contains(&row(wanted)), "{wanted} is missing in\n{tables}");
        }
        assert_eq!(tables.matches("Small programs").count(), 1, "{tables}");
    }

    #[test]
    fn a_verdict_names_the_worst_and_counts_the_others() {
        let on = |behind: i64| (behind, format!("trace{behind}"));
        let told = worst((1..=9).map(on).collect());
        assert_eq!(told, ["trace5", "trace6", "trace7", "trace8", "trace9", "4 others"]);
        assert_eq!(worst((1..=6).map(on).collect()).len(), 6);
        assert_eq!(worst(vec![on(1); 8]).len(), MOST_NAMED + 1);
    }

    #[test]
    fn a_run_that_did_not_complete_has_no_figure_and_beats_none() {
        let mut report = two([[1.5, 1.2, 1.004], [1.03, 1.001, 1.007]], 0);
        report.traces[1].runs[1].completed = false;
        let told = verdict(&report);
        assert!(told.contains("on 2 of 2 traces") && told.contains("1 run did not complete"));
        assert!(draw(&report).contains(" out of memory "), "{}", draw(&report));
        report.traces[0].runs[2].completed = false;
        assert!(verdict(&report).contains("on 1 of 2 traces"), "{}", verdict(&report));
    }

    #[test]
    fn the_table_is_in_per_cent_and_fits_80_columns_with_any_number_of_settings() {
        let told = draw(&two([[1.5, 1.2, 1.004], [1.03, 1.0058, 1.007]], 0));
        let row = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = told.lines().map(row).collect();
        assert!(rows.contains(&row("fsdp 5.00 GiB +50% +20% +0.4%")), "{told}");
        for confs in 0..6 {
            let told = draw(&two([[1.5, 1.2, 1.004], [1.03, 1.0058, 1.007]], confs));
            let widest = told.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= COLUMNS, "{widest}\n{told}");
            assert_eq!(told.matches("+50%").count(), 1 + 2 * confs, "{told}");
        }
    }
}
