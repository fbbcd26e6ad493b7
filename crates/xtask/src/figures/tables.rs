//! Text for the marks in the pages.

use super::{Run, Trace};
use std::fmt::Write as _;

/// The allocators: the bench's names, and names for people.
const ALLOCATORS: [(&str, &str); 3] = [
    ("torch", "torch, default"),
    ("expandable", "torch, expandable segments"),
    ("gruyere", "**Gruyère**"),
];

/// Text between the marks of `name`, which begins with `small` for the small programs; `None`:
/// there is no such figure.
pub fn figure(name: &str, traces: &[Trace]) -> Option<String> {
    match name {
        "lagging" => return Some(lagging(traces)),
        "clocks" => return Some(clocks(traces)),
        _ => {}
    }
    let (name, small) = match name.strip_prefix("small ") {
        Some(name) => (name, true),
        None => (name, false),
    };
    let traces: Vec<&Trace> = traces.iter().filter(|trace| trace.small == small).collect();
    let traces = traces.as_slice();
    let known = |allocator: &str| ALLOCATORS.iter().any(|(name, _)| *name == allocator);
    match name.split_once(' ').unwrap_or((name, "")) {
        ("everything", "") if small => Some(small_programs(traces)),
        ("everything", "") => Some(everything(traces)),
        ("count", "") => Some(traces.len().to_string()),
        ("median", allocator) if known(allocator) => {
            Some(signed(median(excesses(traces, allocator))))
        }
        ("lag-median", allocator) if known(allocator) => {
            Some(signed(median(beyond(traces, allocator, |run| run.lags[USUAL]))))
        }
        ("summary", "") => Some(summary(traces)),
        ("spread", allocator) if known(allocator) => Some(spread(traces, allocator)),
        ("excess", allocator) if known(allocator) => Some(range(excesses(traces, allocator))),
        ("lag-excess", allocator) if known(allocator) => {
            Some(range(beyond(traces, allocator, |run| run.lags[USUAL])))
        }
        ("held-more-than", allocator) if known(allocator) => {
            Some(worse(traces, allocator, |run| run.hold))
        }
        ("lags-more-than", allocator) if known(allocator) => {
            Some(worse(traces, allocator, |run| run.lags[USUAL]))
        }
        ("fits-larger-than", allocator) if known(allocator) => {
            Some(worse(traces, allocator, |run| run.fit))
        }
        _ => None,
    }
}

fn runs<'a>(traces: &'a [&'a Trace], allocator: &'a str) -> impl Iterator<Item = &'a Run> {
    let all = traces.iter().flat_map(|trace| &trace.runs);
    all.filter(move |run| run.allocator == allocator)
}

/// Held memory beyond the peak of live, percent.
fn excesses(traces: &[&Trace], allocator: &str) -> Vec<f64> {
    beyond(traces, allocator, |run| run.hold)
}

/// Excess of a ratio to live over 1, percent.
fn beyond(traces: &[&Trace], allocator: &str, ratio: Figure) -> Vec<f64> {
    runs(traces, allocator).map(|run| (ratio(run) - 1.0) * 100.0).collect()
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn range(percents: Vec<f64>) -> String {
    format!("{} to {}", percent(least(&percents)), percent(most(&percents)))
}

/// Two significant digits.
fn percent(value: f64) -> String {
    if value < 9.95 { format!("{value:.1}%") } else { format!("{value:.0}%") }
}

/// The traces on which an allocator's printed figure is above `other`'s.
fn above<'a>(
    traces: &[&'a Trace],
    allocator: &str,
    other: &str,
    of: impl Fn(&Run) -> f64,
) -> Vec<&'a Trace> {
    let one = |trace: &Trace, allocator: &str| {
        let run = trace.runs.iter().find(|run| run.allocator == allocator)?;
        // Rounded as in the table: smaller differences do not count.
        Some((of(run) * 1000.0).round())
    };
    let worse = |trace: &&&Trace| one(trace, allocator) > one(trace, other);
    traces.iter().filter(worse).copied().collect()
}

/// The traces on which Gruyère's figure is above `other`'s.
fn worse(traces: &[&Trace], other: &str, of: impl Fn(&Run) -> f64) -> String {
    let worse = above(traces, "gruyere", other, of);
    let worse: Vec<String> = worse.iter().map(|trace| format!("`{}`", trace.name)).collect();
    match worse.split_last() {
        None => "no trace".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
    }
}

/// GiB, two digits.
pub fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// Small programs beside the large ones in README: one with a loader's stream, one with a stream
/// per thread.
const SHOWN: [&str; 2] = ["prefetch", "threads"];

/// Index in [`Run::lags`] of the default clock: kernels of 20 us.
const USUAL: usize = 1;

/// A row per trace, two small programs included: each allocator's held memory beyond the peak of
/// live, with kernels that take time.
fn lagging(traces: &[Trace]) -> String {
    let mut table = "\n\n| trace | peak live | torch, default | torch, expandable segments | \
                     **Gruyère** |\n|---|---:|---:|---:|---:|\n"
        .to_owned();
    let shown = |trace: &&Trace| !trace.small || SHOWN.contains(&trace.name.as_str());
    for trace in traces.iter().filter(shown) {
        let _ = write!(table, "| {} | {} GiB |", trace.name, gib(trace.peak_live));
        for (allocator, _) in ALLOCATORS {
            let run = trace.runs.iter().find(|run| run.allocator == allocator);
            let cell = run.map_or("-".into(), |run| signed((run.lags[USUAL] - 1.0) * 100.0));
            let _ = write!(table, " {cell} |");
        }
        table.push('\n');
    }
    table + "\n"
}

/// For traces with several streams: each allocator's held memory beyond the peak of live, on a
/// device without delay and on each clock.
fn clocks(traces: &[Trace]) -> String {
    let mut table = "\n\n| trace | allocator | peak live | at once | 5 us | 20 us | 100 us |\n\
                     |---|---|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for trace in traces.iter().filter(|trace| trace.streams > 1) {
        for (index, run) in trace.runs.iter().enumerate() {
            let (name, live) = match index {
                0 => (trace.name.as_str(), format!("{} GiB", gib(trace.peak_live))),
                _ => ("", String::new()),
            };
            let allocator = ALLOCATORS.iter().find(|(name, _)| *name == run.allocator);
            let allocator = allocator.map_or(run.allocator.as_str(), |(_, name)| name);
            let _ = write!(table, "| {name} | {allocator} | {live} |");
            for hold in std::iter::once(run.hold).chain(run.lags) {
                let _ = write!(table, " {} |", signed((hold - 1.0) * 100.0));
            }
            table.push('\n');
        }
    }
    table + "\n"
}

/// The largest difference between clocks in the hold of a trace with a single stream, percent.
fn spread(traces: &[&Trace], allocator: &str) -> String {
    let single: Vec<&Trace> = traces.iter().copied().filter(|trace| trace.streams == 1).collect();
    let spread = |run: &Run| {
        let holds = [run.hold, run.lags[0], run.lags[1], run.lags[2]];
        (most(&holds) - least(&holds)) * 100.0
    };
    percent(runs(&single, allocator).map(spread).fold(0.0, f64::max))
}

/// A row per allocator, over all traces.
fn summary(traces: &[&Trace]) -> String {
    let mut table = "\n\n| allocator | held beyond live | on average | fit |\n\
                     |---|---:|---:|---:|\n"
        .to_owned();
    for (allocator, name) in ALLOCATORS {
        let excesses = excesses(traces, allocator);
        let fits: Vec<f64> = runs(traces, allocator).map(|run| run.fit).collect();
        let mean = excesses.iter().sum::<f64>() / excesses.len().max(1) as f64;
        let (excess, mean) = (range(excesses), percent(mean));
        let (least, most) = (least(&fits), most(&fits));
        let _ = writeln!(table, "| {name} | {excess} | {mean} | {least:.3} to {most:.3} |");
    }
    table + "\n"
}

/// A figure of a run.
type Figure = fn(&Run) -> f64;

/// For the small programs: each allocator's held memory beyond live, the smallest device, and a
/// summary of the rows.
fn small_programs(traces: &[&Trace]) -> String {
    let mut table = "\n\n| program | peak live |".to_owned();
    for what in ["held", "smallest device"] {
        for name in ["default", "expandable", "**Gruyère**"] {
            let _ = write!(table, " {what}, {name} |");
        }
    }
    table.push_str("\n|---|---:|---:|---:|---:|---:|---:|---:|\n");
    let figures: [Figure; 2] = [|run| run.hold, |run| run.fit];
    let beyond = |of: Figure, allocator: &str| -> Vec<f64> {
        runs(traces, allocator).map(|run| (of(run) - 1.0) * 100.0).collect()
    };
    for trace in traces {
        let _ = write!(table, "| {} | {} MiB |", trace.name, trace.peak_live >> 20);
        for of in figures {
            for (allocator, _) in ALLOCATORS {
                let run = trace.runs.iter().find(|run| run.allocator == allocator);
                let cell = run.map_or("-".into(), |run| signed((of(run) - 1.0) * 100.0));
                let _ = write!(table, " {cell} |");
            }
        }
        table.push('\n');
    }
    let mut row = |name: &str, cell: &dyn Fn(Figure, &str) -> String| {
        let _ = write!(table, "| {name} | |");
        for of in figures {
            for (allocator, _) in ALLOCATORS {
                let _ = write!(table, " {} |", cell(of, allocator));
            }
        }
        table.push('\n');
    };
    row("**worst**", &|of, allocator| signed(most(&beyond(of, allocator))));
    row("**median**", &|of, allocator| signed(median(beyond(of, allocator))));
    for (other, name) in [("torch", "**above default**"), ("expandable", "**above expandable**")] {
        row(name, &|of, allocator| match allocator == other {
            true => String::new(),
            false => above(traces, allocator, other, of).len().to_string(),
        });
    }
    table + "\n"
}

fn signed(percents: f64) -> String {
    let sign = if percents < 0.0 { "" } else { "+" };
    format!("{sign}{}", percent(percents))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        _ if values.is_empty() => f64::NAN,
        0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Every figure, a row per allocator and trace.
fn everything(traces: &[&Trace]) -> String {
    let mut table = "\n\n| trace | allocator | peak live | peak held | hold | fit | hold on time \
                     | device end | driver calls |\n|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for trace in traces {
        for (index, run) in trace.runs.iter().enumerate() {
            let (name, live) = match index {
                0 => (trace.name.as_str(), gib(trace.peak_live)),
                _ => ("", String::new()),
            };
            let allocator = ALLOCATORS.iter().find(|(name, _)| *name == run.allocator);
            let _ = writeln!(
                table,
                "| {name} | {} | {live} | {} | {:.4} | {:.3} | {:.2} | {:+.2}% | {} |",
                allocator.map_or(run.allocator.as_str(), |(_, name)| name),
                gib(run.peak_reserved),
                run.hold,
                run.fit,
                run.lags[USUAL],
                (run.device_end.unwrap_or(f64::NAN) - 1.0) * 100.0,
                thousands(run.driver_calls),
            );
        }
    }
    table + "\n"
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    let groups = groups.into_iter().map(|group| String::from_utf8_lossy(group));
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(allocator: &str, hold: f64, fit: f64) -> Run {
        let allocator = allocator.to_owned();
        let (lags, device_end) = ([hold, hold + 0.01, hold], Some(1.02));
        let peak_reserved = (hold * (1u64 << 30) as f64) as u64;
        Run { allocator, peak_reserved, hold, fit, lags, device_end, driver_calls: 1_234_567 }
    }

    fn two() -> Vec<Trace> {
        [("a", 1.5, 1.01, 1.004), ("b", 1.029, 1.0, 1.007)]
            .map(|(name, torch, expandable, ours)| Trace {
                name: name.to_owned(),
                peak_live: 1 << 30,
                runs: vec![
                    run("torch", torch, 1.02),
                    run("expandable", expandable, 1.0),
                    run("gruyere", ours, 1.001),
                ],
                streams: 1,
                small: false,
            })
            .into()
    }

    #[test]
    fn small_programs_have_figures_of_their_own() {
        let mut traces = two();
        for (name, ours) in [("c", 1.08), ("d", 1.04), ("e", 1.02)] {
            let runs = vec![
                run("torch", 1.06, 1.02),
                run("expandable", 1.03, 1.0),
                run("gruyere", ours, 1.001),
            ];
            let name = name.to_owned();
            traces.push(Trace { name, peak_live: 138 << 20, runs, streams: 2, small: true });
        }
        let of = |name| figure(name, &traces).unwrap();
        assert_eq!(of("excess torch"), "2.9% to 50%");
        assert_eq!(of("small count"), "3");
        assert_eq!(of("small median gruyere"), "+4.0%");
        assert_eq!(of("small lag-median gruyere"), "+5.0%");
        assert_eq!(of("small held-more-than torch"), "`c`");
        assert_eq!(of("small held-more-than expandable"), "`c` and `d`");
        let table = of("small everything");
        for row in [
            "| c | 138 MiB | +6.0% | +3.0% | +8.0% | +2.0% | +0.0% | +0.1% |\n",
            "| **worst** | | +6.0% | +3.0% | +8.0% | +2.0% | +0.0% | +0.1% |\n",
            "| **median** | | +6.0% | +3.0% | +4.0% | +2.0% | +0.0% | +0.1% |\n",
            "| **above default** | |  | 0 | 1 |  | 0 | 0 |\n",
            "| **above expandable** | | 3 |  | 2 | 3 |  | 3 |\n",
        ] {
            assert!(table.contains(row), "{row} is missing in\n{table}");
        }
    }

    fn all(traces: &[Trace]) -> Vec<&Trace> {
        traces.iter().collect()
    }

    #[test]
    fn a_figure_is_computed_from_the_runs() {
        let of = |name| figure(name, &two());
        assert_eq!(of("excess torch").unwrap(), "2.9% to 50%");
        assert_eq!(of("excess gruyere").unwrap(), "0.4% to 0.7%");
        assert_eq!(of("lag-excess gruyere").unwrap(), "1.4% to 1.7%");
        assert_eq!(of("held-more-than expandable").unwrap(), "`b`");
        assert_eq!(of("held-more-than torch").unwrap(), "no trace");
        assert_eq!(of("fits-larger-than expandable").unwrap(), "`a` and `b`");
        assert_eq!((of("excess nobody"), of("weather")), (None, None));
    }

    #[test]
    fn tables_have_a_row_for_each_trace_and_run() {
        assert!(lagging(&two()).contains("| b | 1.00 GiB | +3.9% | +1.0% | +1.7% |\n"));
        let row = "| torch, default | 2.9% to 50% | 26% | 1.020 to 1.020 |\n";
        assert!(summary(&all(&two())).contains(row), "{}", summary(&all(&two())));
        let everything = everything(&all(&two()));
        assert_eq!(everything.lines().count(), 4 + 6 + 1);
        let row = "|  | **Gruyère** |  | 1.00 | 1.0040 | 1.001 | 1.01 | +2.00% | 1,234,567 |";
        assert!(everything.contains(row), "{everything}");
    }

    #[test]
    fn traces_of_several_streams_have_a_row_on_each_clock_and_the_others_a_spread() {
        let mut traces = two();
        assert_eq!(figure("spread gruyere", &traces).unwrap(), "1.0%");
        assert_eq!(clocks(&traces).lines().count(), 5);
        traces[0].streams = 3;
        let table = clocks(&traces);
        assert_eq!(table.lines().count(), 5 + 3);
        assert!(
            table.contains("|  | **Gruyère** |  | +0.4% | +0.4% | +1.4% | +0.4% |\n"),
            "{table}"
        );
    }
}
