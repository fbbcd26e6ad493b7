//! The figures in README and docs: measured by `gruyere bench --fit --timeline` on four clocks,
//! kept in `benches/results/figures.json`, and written between marks in the pages, so that none is
//! older than the last measurement.
//!
//! All of them repeat to the byte on any machine (they depend on the traces, the stand-in's books
//! and its virtual clock), so the test measures again and compares.

mod pages;
mod tables;
mod torch;

use serde_json::Value;
use std::path::Path;

use crate::parts::{cargo, succeed, text};

/// The last measurement.
const KEPT: &str = "benches/results/figures.json";
/// The picture that the bench draws.
const PICTURE: &str = "docs/bench.svg";
/// Output of a run.
const FRESH: &str = "target/figures";

/// The clocks of `bench`, by its names: the duration of kernels. The first is the clock of the
/// picture and of all figures without a named clock.
const CLOCKS: [&str; 4] = ["20us", AT_ONCE, "5us", "100us"];
/// The clock of a device without delay.
const AT_ONCE: &str = "0";

/// One allocator on one trace.
struct Run {
    /// The bench's name: `torch`, `expandable`, `gruyere`.
    allocator: String,
    /// Bytes, on a device without delay.
    peak_reserved: u64,
    /// Peak reserved over peak live there.
    hold: f64,
    /// Smallest device that completes over peak live.
    fit: f64,
    /// `hold` with kernels that take time: 5, 20 and 100 us.
    lags: [f64; 3],
    /// End of the device's work over that with an allocator without cost.
    device_end: Option<f64>,
    /// Calls of the driver.
    driver_calls: u64,
}

/// One trace.
struct Trace {
    name: String,
    /// Bytes.
    peak_live: u64,
    runs: Vec<Run>,
    /// Streams, the default one included.
    streams: u64,
    /// One of `traces/small`.
    small: bool,
}

/// `cargo xtask figures`: measures, and writes the kept figures, the picture and the pages; with
/// `torch`, measures the real programs too.
pub fn write(root: &Path, torch: bool) -> Result<(), String> {
    if torch {
        torch::measure(root)?;
    }
    let report = measure(root)?;
    put(&root.join(KEPT), &kept(&report)?)?;
    put(&root.join(PICTURE), &text(&root.join(FRESH).join("bench.svg"))?)?;
    for (path, text) in pages::fresh(root, &known(root, &report)?)? {
        put(&path, &text)?;
    }
    Ok(())
}

/// This part of the test run: the kept figures equal a new measurement, and the pages have them.
pub fn check(root: &Path) -> Result<(), String> {
    let report = measure(root)?;
    let last = read(&root.join(KEPT))?;
    let mut stale = Vec::new();
    if last["figures"].as_array() != Some(&figures(&report)?) {
        stale.push(KEPT.to_owned());
    }
    if text(&root.join(PICTURE))? != text(&root.join(FRESH).join("bench.svg"))? {
        stale.push(PICTURE.to_owned());
    }
    for (path, fresh) in pages::fresh(root, &known(root, &report)?)? {
        if text(&path)? != fresh {
            stale.push(path.display().to_string());
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    Err(format!("older than what is measured now: {}; `cargo xtask figures`", stale.join(", ")))
}

/// Source of all figures in pages.
struct Known {
    traces: Vec<Trace>,
    torch: Vec<torch::Program>,
}

fn known(root: &Path, report: &Value) -> Result<Known, String> {
    Ok(Known { traces: traces(report)?, torch: torch::last(root)? })
}

/// The report of a new run.
fn measure(root: &Path) -> Result<Value, String> {
    let bench = ["run", "--release", "--quiet", "--locked", "--package", "gruyere-cli", "--"];
    let options = ["bench", "--fit", "--timeline", "--out", FRESH, "--clock"];
    succeed(cargo(root, &bench).args(options).arg(CLOCKS.join(",")))?;
    read(&root.join(FRESH).join("bench.json"))
}

fn read(path: &Path) -> Result<Value, String> {
    serde_json::from_str(&text(path)?).map_err(|error| format!("{}: {error}", path.display()))
}

fn put(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The part of a report to keep: date and machine of the measurement, and its figures, a run per
/// line.
fn kept(report: &Value) -> Result<String, String> {
    let command = format!("gruyere bench --fit --timeline --clock {}", CLOCKS.join(","));
    let head = serde_json::json!({
        "command": command, "date": report["date"],
        "git_commit": report["git_commit"], "machine": report["machine"],
    });
    let lines: Vec<_> = figures(report)?.iter().map(Value::to_string).collect();
    Ok(format!("{{\n\"measured\": {head},\n\"figures\": [\n{}\n]\n}}\n", lines.join(",\n")))
}

/// The figures of a report, one entry per run.
fn figures(report: &Value) -> Result<Vec<Value>, String> {
    let figures = |trace: &Trace| {
        let one = |run: &Run| {
            let mut figures = serde_json::json!({
                "trace": trace.name, "peak_live": trace.peak_live, "streams": trace.streams,
                "allocator": run.allocator, "peak_reserved": run.peak_reserved,
                "hold": short(run.hold), "hold_5us": short(run.lags[0]),
                "hold_20us": short(run.lags[1]), "hold_100us": short(run.lags[2]),
                "fit": short(run.fit), "driver_calls": run.driver_calls,
            });
            if let Some(end) = run.device_end {
                figures["device_end"] = short(end).into();
            }
            figures
        };
        trace.runs.iter().map(one).collect::<Vec<_>>()
    };
    Ok(traces(report)?.iter().flat_map(figures).collect())
}

/// Rounds to digits that a JSON reader returns unchanged.
fn short(ratio: f64) -> f64 {
    (ratio * 1e6).round() / 1e6
}

/// The traces of a report, with the small programs last.
fn traces(report: &Value) -> Result<Vec<Trace>, String> {
    let list = |value: &Value, what: &str| {
        value[what].as_array().cloned().ok_or_else(|| format!("bench.json: no list {what:?}"))
    };
    let trace = |trace: &Value, small| {
        Ok(Trace {
            name: word(trace, "trace")?,
            peak_live: count(trace, "peak_live")?,
            streams: count(trace, "streams")?,
            runs: list(trace, "runs")?.iter().map(run).collect::<Result<_, String>>()?,
            small,
        })
    };
    let (large, small) = (list(report, "traces")?, list(report, "small")?);
    let large = large.iter().map(|of| trace(of, false));
    large.chain(small.iter().map(|of| trace(of, true))).collect()
}

fn run(run: &Value) -> Result<Run, String> {
    let time = Some(&run["timeline"]).filter(|time| !time.is_null());
    let timed = |what| time.map(|time| number(time, what)).transpose();
    let on = |clock: &str| {
        let clocks = run["clocks"].as_array().into_iter().flatten();
        clocks.clone().find(|lag| lag["clock"] == clock).ok_or_else(|| missing(clock))
    };
    let hold = |clock| number(on(clock)?, "hold_ratio");
    Ok(Run {
        allocator: word(run, "allocator")?,
        peak_reserved: count(on(AT_ONCE)?, "peak_reserved")?,
        hold: hold(AT_ONCE)?,
        fit: number(run, "fit_ratio")?,
        lags: [hold("5us")?, hold("20us")?, hold("100us")?],
        device_end: timed("device_end_ns")?
            .zip(timed("perfect_end_ns")?)
            .map(|(end, perfect)| end / perfect),
        driver_calls: count(run, "driver_calls")?,
    })
}

fn missing(what: &str) -> String {
    format!("bench.json: no {what:?} where one belongs")
}

fn word(value: &Value, what: &str) -> Result<String, String> {
    value[what].as_str().map(str::to_owned).ok_or_else(|| missing(what))
}

fn count(value: &Value, what: &str) -> Result<u64, String> {
    value[what].as_u64().ok_or_else(|| missing(what))
}

fn number(value: &Value, what: &str) -> Result<f64, String> {
    value[what].as_f64().ok_or_else(|| missing(what))
}
