//! The figures of `gruyere bench --torch --stand-in`: real torch programs under torch's allocators
//! and ours.
//!
//! It runs for ten minutes or more, so the test run does not repeat it: the file keeps the last
//! measurement, and the pages say so.

use super::tables::gib;
use super::{count, number, read, short, word};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

use crate::parts::{cargo, succeed};

/// The last measurement.
const KEPT: &str = "benches/results/torch.json";
/// Output of a run.
const FRESH: &str = "target/figures/torch.json";

/// A program.
pub struct Program {
    name: String,
    /// Bytes.
    peak_live: u64,
    runs: Vec<Run>,
}

/// An allocator's run of the program.
struct Run {
    /// The bench's name for it.
    allocator: String,
    /// Bytes.
    held: u64,
    /// Peak held over peak live.
    hold: f64,
    /// The smallest device that completes, bytes.
    fit: u64,
    /// The smallest device over peak live.
    fit_ratio: f64,
    /// Host time of a step over that under torch's default.
    host: f64,
}

/// Measures, and keeps the result.
pub fn measure(root: &Path) -> Result<(), String> {
    let bench = ["run", "--release", "--quiet", "--locked", "--package", "gruyere-cli", "--"];
    let options = ["bench", "--torch", "--stand-in", "--runs", "2", "--json", FRESH];
    let folder = root.join(super::FRESH);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    // Made by tests/pytorch/run, as the libraries are.
    let python = root.join(".venv-torch/bin/python");
    succeed(cargo(root, &bench).args(options).arg("--python").arg(python))?;
    let report = read(&root.join(FRESH))?;
    let programs = programs(&report)?;
    let head = serde_json::json!({
        "command": "gruyere bench --torch --stand-in --runs 2", "machine": report["machine"],
    });
    let lines: Vec<String> = programs.iter().map(|program| kept(program).to_string()).collect();
    let text =
        format!("{{\n\"measured\": {head},\n\"programs\": [\n{}\n]\n}}\n", lines.join(",\n"));
    super::put(&root.join(KEPT), &text)
}

fn kept(program: &Program) -> Value {
    let row = |run: &Run| {
        serde_json::json!({
            "allocator": run.allocator, "outcome": "completed", "physical_peak": run.held,
            "hold_ratio": short(run.hold), "fit_bytes": run.fit,
            "fit_ratio": short(run.fit_ratio), "host_ratio": short(run.host),
        })
    };
    let rows: Vec<Value> = program.runs.iter().map(row).collect();
    serde_json::json!({"program": program.name, "peak_live": program.peak_live, "rows": rows})
}

/// The last measurement.
pub fn last(root: &Path) -> Result<Vec<Program>, String> {
    programs(&read(&root.join(KEPT))?)
}

fn programs(report: &Value) -> Result<Vec<Program>, String> {
    let rows = |value: &Value, what: &str| {
        value[what].as_array().cloned().ok_or_else(|| format!("{KEPT}: no list {what:?}"))
    };
    let run = |row: &Value| {
        let allocator = word(row, "allocator")?;
        if row["outcome"] != "completed" {
            return Err(format!("{allocator}: {} {}", row["outcome"], row["reason"]));
        }
        Ok(Run {
            held: count(row, "physical_peak")?,
            hold: number(row, "hold_ratio")?,
            fit: count(row, "fit_bytes")?,
            fit_ratio: number(row, "fit_ratio")?,
            host: number(row, "host_ratio")?,
            allocator,
        })
    };
    let program = |program: &Value| {
        Ok(Program {
            name: word(program, "program")?,
            peak_live: count(program, "peak_live")?,
            runs: rows(program, "rows")?.iter().map(run).collect::<Result<_, String>>()?,
        })
    };
    rows(report, "programs")?.iter().map(program).collect()
}

/// Text between the marks of `torch WHAT`; `None`: there is no such figure.
pub fn figure(what: &str, programs: &[Program]) -> Option<String> {
    match what.split_whitespace().collect::<Vec<_>>()[..] {
        ["table"] => Some(table(programs)),
        ["holds", allocator] => Some(range(programs, allocator, |run| run.hold)),
        ["fits", allocator] => Some(range(programs, allocator, |run| run.fit_ratio)),
        ["host", allocator] => Some(range(programs, allocator, |run| run.host)),
        ["before-and-after", name] => {
            before_and_after(programs.iter().find(|program| program.name == name)?)
        }
        _ => None,
    }
}

/// The least and the most over all programs.
fn range(programs: &[Program], allocator: &str, of: impl Fn(&Run) -> f64) -> String {
    let runs = programs.iter().flat_map(|program| &program.runs);
    let found: Vec<f64> = runs.filter(|run| run.allocator == allocator).map(of).collect();
    let least = found.iter().copied().fold(f64::INFINITY, f64::min);
    let most = found.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let digits = if found.iter().any(|&ratio| ratio < 0.999) { 2 } else { 3 };
    format!("{least:.digits$} to {most:.digits$}")
}

/// Every figure, a row per allocator and program.
fn table(programs: &[Program]) -> String {
    let mut table =
        "\n\n| program | allocator | peak live | peak physical | hold | smallest device \
                     | fit | host a step, of default |\n|---|---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
    for program in programs {
        for (index, run) in program.runs.iter().enumerate() {
            let (name, live) = match index {
                0 => (program.name.as_str(), size(program.peak_live)),
                _ => ("", String::new()),
            };
            let allocator = match run.allocator.as_str() {
                "gruyere" => "**Gruyère**",
                other => other,
            };
            let Run { held, hold, fit, fit_ratio, host, .. } = *run;
            let (held, fit) = (size(held), size(fit));
            let _ = writeln!(
                table,
                "| {name} | {allocator} | {live} | {held} | {hold:.3} | {fit} | {fit_ratio:.3} | \
                 {host:.2} |"
            );
        }
    }
    table + "\n"
}

/// A program's figures for the README.
fn before_and_after(program: &Program) -> Option<String> {
    let mut table = "\n\n| | peak live | peak held | smallest device on which it completes |\n\
                     |---|---:|---:|---:|\n"
        .to_owned();
    let rows = [
        ("default", "`python train.py`"),
        ("expandable", "the same, `expandable_segments:True`"),
        ("gruyere", "`python -m gruyere train.py`"),
    ];
    for (index, (allocator, words)) in rows.into_iter().enumerate() {
        let run = program.runs.iter().find(|run| run.allocator == allocator)?;
        let live = if index == 0 { size(program.peak_live) } else { String::new() };
        let _ = writeln!(table, "| {words} | {live} | {} | {} |", size(run.held), size(run.fit));
    }
    Some(table + "\n")
}

fn size(bytes: u64) -> String {
    if bytes >= 1 << 30 { format!("{} GiB", gib(bytes)) } else { format!("{} MiB", bytes >> 20) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Value {
        let row = |allocator: &str, held: u64, host: f64| {
            serde_json::json!({
                "allocator": allocator, "outcome": "completed", "physical_peak": held << 20,
                "hold_ratio": held as f64 / 1024.0, "fit_bytes": 1000u64 << 20,
                "fit_ratio": 1.0, "host_ratio": host,
            })
        };
        let rows =
            [row("default", 2048, 1.0), row("expandable", 1100, 0.9), row("gruyere", 1030, 0.95)];
        serde_json::json!({"programs": [{"program": "moe", "peak_live": 1u64 << 30, "rows": rows}]})
    }

    #[test]
    fn the_pages_say_what_was_measured() {
        let programs = programs(&report()).unwrap();
        let of = |what| figure(what, &programs);
        let row = "|  | **Gruyère** |  | 1.01 GiB | 1.006 | 1000 MiB | 1.000 | 0.95 |\n";
        assert!(of("table").unwrap().contains(row), "{}", of("table").unwrap());
        assert_eq!(of("holds default").unwrap(), "2.000 to 2.000");
        assert_eq!(of("host gruyere").unwrap(), "0.95 to 0.95");
        let row = "| `python train.py` | 1.00 GiB | 2.00 GiB | 1000 MiB |\n";
        assert!(of("before-and-after moe").unwrap().contains(row));
        assert_eq!((of("before-and-after nobody"), of("weather")), (None, None));
        let kept = serde_json::json!({"programs": [kept(&programs[0])]});
        assert_eq!(table(&super::programs(&kept).unwrap()), table(&programs));
    }

    #[test]
    fn a_run_that_did_not_complete_is_no_figure() {
        let mut report = report();
        report["programs"][0]["rows"][1]["outcome"] = "out of memory".into();
        assert!(programs(&report).is_err_and(|reason| reason.contains("expandable")));
    }
}
