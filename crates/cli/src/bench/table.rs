//! The table of every figure (`--full`).

use super::report::{Report, TraceReport};
use super::summary;
use crate::driver_calls;
use crate::wrap::fit;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table};
use gruyere_replay::bench::Run;
use std::fmt::Write as _;

/// A column: its heading, its text for a run, and whether a report shows it.
struct Column {
    heading: &'static str,
    note: &'static str,
    cell: fn(&TraceReport, &Run) -> String,
    shown: fn(&Report) -> bool,
}

const COLUMNS: &[Column] = &[
    Column { heading: "allocator", note: "", cell: |_, run| run.allocator.clone(), shown: always },
    Column {
        heading: "peak live\nGiB",
        note: "",
        cell: |trace, run| {
            let first = trace.runs.first().is_some_and(|first| std::ptr::eq(first, run));
            if first { gib(trace.peak_live) } else { String::new() }
        },
        shown: always,
    },
    Column {
        heading: "peak held\nGiB",
        note: "",
        cell: |_, run| if run.completed { gib(run.peak_reserved) } else { "out of memory".into() },
        shown: always,
    },
    Column {
        heading: "hold\nratio",
        note: "hold ratio: peak held / peak live; 1 is the physical limit",
        cell: |_, run| format!("{:.4}", run.hold_ratio),
        shown: always,
    },
    Column {
        heading: "area\nratio",
        note: "area ratio: held / live, both summed over all mallocs and frees",
        cell: |_, run| format!("{:.2}", run.area_ratio),
        shown: always,
    },
    Column {
        heading: "fit\nratio",
        note: "fit ratio: smallest device that completes / peak live, to a thousandth",
        cell: |_, run| run.fit_ratio.map_or("none".into(), |fit| format!("{fit:.3}")),
        shown: |report| report.measured.fit,
    },
    Column {
        heading: "hold on\neach clock",
        note: "hold on each clock: the hold ratio with each value of --clock, in that order",
        cell: |_, run| {
            let holds = run.clocks.iter().map(|lag| format!("{:.3}", lag.hold_ratio));
            holds.collect::<Vec<_>>().join(" ")
        },
        shown: |report| report.measured.clocks.len() > 1,
    },
    Column {
        heading: "hold\ncharged",
        note: "hold charged: the hold ratio with driver calls charged",
        cell: |_, run| timeline(run, |time| format!("{:.2}", time.hold_ratio_charged)),
        shown: |report| report.measured.timeline,
    },
    Column {
        heading: "device\nend",
        note: "device end: end of the last kernel, driver calls charged / with an allocator that \
               costs nothing",
        // A trace without kernels has no end of the device's work.
        cell: |_, run| {
            timeline(run, |time| match time.perfect_end_ns {
                0 => "-".to_owned(),
                _ => format!("{:+.2}%", (time.end_ratio() - 1.0) * 100.0),
            })
        },
        shown: |report| report.measured.timeline,
    },
    Column {
        heading: "host\nblocked ms",
        note: "host blocked: host time that the allocator spends waiting, on the timeline",
        cell: |_, run| timeline(run, |time| format!("{:.1}", time.host_blocked_ns as f64 / 1e6)),
        shown: |report| report.measured.timeline,
    },
    Column {
        heading: "driver\ncalls",
        note: "",
        cell: |_, run| run.driver_calls.to_string(),
        shown: always,
    },
    Column {
        heading: "ns/op",
        note: "ns/op: host nanoseconds per malloc or free through the C ABI, with the record on (a \
               model's time would mean nothing)",
        cell: |_, run| run.ns_per_operation.map_or("".into(), |ns| format!("{ns:.0}")),
        shown: |report| report.runs().any(|(_, run)| run.ns_per_operation.is_some()),
    },
];

fn always(_: &Report) -> bool {
    true
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

fn timeline(run: &Run, cell: impl FnOnce(&gruyere_replay::bench::Timeline) -> String) -> String {
    run.timeline.as_ref().map_or(String::new(), cell)
}

/// The table and its notes.
pub fn draw(report: &Report) -> String {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| (column.shown)(report)).collect();
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(std::iter::once("trace").chain(columns.iter().map(|column| column.heading)));
    for trace in report.traces.iter().chain(&report.small) {
        let lines = |cell: &dyn Fn(&Run) -> String| {
            trace.runs.iter().map(cell).collect::<Vec<_>>().join("\n")
        };
        let cells = columns.iter().map(|column| lines(&|run| (column.cell)(trace, run)));
        table.add_row(std::iter::once(trace.trace.clone()).chain(cells));
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(ColumnConstraint::ContentWidth);
        column.set_cell_alignment(if index < 2 {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        });
    }
    let mut text = format!("\n{table}\n");
    for column in columns.iter().filter(|column| !column.note.is_empty()) {
        text += &fit(&format!("  {}", column.note));
    }
    if report.device == "stand-in"
        && let Some(clock) = report.measured.clocks.first()
    {
        let _ = writeln!(text, "  {}", summary::on(*clock, report));
    }
    if report.measured.timeline {
        let _ = writeln!(text, "  prices of driver calls: {}", report.measured.prices);
    }
    text
}

/// Time in driver calls, for the runs on a real device.
pub fn driver_calls(report: &Report) -> String {
    let mut text = String::new();
    for (trace, run) in report.runs().filter(|(_, run)| run.replay_ns.is_some()) {
        let (times, whole) = (&run.driver_call_times, run.replay_ns.unwrap_or(0));
        let calls = times.iter().fold(0u64, |sum, time| sum.saturating_add(time.total_nanoseconds));
        let (whole, calls) = (driver_calls::span(whole), driver_calls::span(calls));
        let _ = writeln!(
            text,
            "\n{} on {}: the replay took {whole}, {calls} of it in driver calls",
            run.allocator, trace.trace
        );
        driver_calls::table(times).iter().for_each(|row| {
            let _ = writeln!(text, "  {row}");
        });
    }
    text
}
