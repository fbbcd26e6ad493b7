//! Compares two runs: their peaks, and their course by step.

use std::collections::HashSet;
use std::fmt::Write as _;

use gruyere_record::plain;
use gruyere_record::run::{Run, RunDevice, Steps};
use gruyere_record::sites::Line;
use serde_json::{Value, json};

use super::bounds::{Bounds, Pair, percent};
use super::{Compared, unfinished, when};
use crate::amounts::bytes;
use crate::driver_calls;
use crate::wrap::wrap;

/// Compares two runs, with the steps in `parts` parts.
pub fn compare(now: &Run, before: Option<&Run>, parts: u64, bounds: Bounds) -> Compared {
    let counterpart = |device: &RunDevice| match (&now.devices[..], &before?.devices[..]) {
        // Two ranks, each on a GPU of its own.
        ([_], [only]) => Some(only),
        (_, devices) => devices.iter().find(|other| other.device == device.device),
    };
    let comparisons: Vec<Comparison> = now
        .devices
        .iter()
        .map(|device| Comparison::new(device, counterpart(device), parts))
        .collect();
    let worse: Vec<String> =
        comparisons.iter().flat_map(|comparison| comparison.worse(bounds)).collect();
    Compared {
        value: value(now, before, &comparisons, &worse),
        text: text(now, before, &comparisons),
        worse,
    }
}

/// A device of the run, with the earlier run's.
struct Comparison<'a> {
    now: &'a RunDevice,
    before: Option<&'a RunDevice>,
    /// Both runs' values for the same steps.
    steps: Vec<Pair<Steps>>,
}

impl<'a> Comparison<'a> {
    fn new(now: &'a RunDevice, before: Option<&'a RunDevice>, parts: u64) -> Self {
        let last = before.map_or(now.steps, |before| before.steps.min(now.steps));
        let of = |run: &RunDevice| run.by_steps(0, last.saturating_sub(1), parts);
        let earlier = before.map(of).unwrap_or_default();
        let pair = |(number, now)| Pair { before: earlier.get(number).copied(), now };
        let steps = if last == 0 {
            Vec::new()
        } else {
            of(now).into_iter().enumerate().map(pair).collect()
        };
        Self { now, before, steps }
    }

    /// The device, and its counterpart if that has another number.
    fn name(&self) -> String {
        let number = self.now.device;
        match self.before.map(|before| before.device).filter(|before| *before != number) {
            Some(before) => format!("device {number} (against device {before})"),
            None => format!("device {number}"),
        }
    }

    fn ratios(&self, of: impl Fn(&RunDevice) -> Option<f64>) -> Option<Pair<f64>> {
        Some(Pair { before: self.before.and_then(&of), now: of(self.now)? })
    }

    fn pair<T>(&self, of: impl Fn(&RunDevice) -> T) -> Pair<T> {
        Pair { before: self.before.map(&of), now: of(self.now) }
    }

    /// Regressions past the bounds, in words.
    fn worse(&self, bounds: Bounds) -> Vec<String> {
        let device = self.name();
        let growth = |what: &str, pair| bounds.growth_of(&device, what, pair);
        let rise = |what: &str, pair| bounds.rise_of(&device, what, pair);
        let mut worse = vec![
            growth("held at the peak", self.pair(|run| run.reserved_peak_bytes)),
            growth("live at the peak", self.pair(|run| run.live_peak_bytes)),
        ];
        for pair in &self.steps {
            let of = |field: fn(&Steps) -> u64| Pair {
                before: pair.before.as_ref().map(field),
                now: field(&pair.now),
            };
            let steps = steps_text(&pair.now);
            worse.push(growth(&format!("held in {steps}"), of(|steps| steps.reserved)));
            worse.push(growth(&format!("in use in {steps}"), of(|steps| steps.in_use)));
        }
        if let Some(pair) = self.ratios(RunDevice::peak_ratio) {
            worse.push(rise("the peak ratio", pair));
        }
        for pair in &self.steps {
            if let Some(now) = pair.now.ratio() {
                let before = pair.before.as_ref().and_then(Steps::ratio);
                let what = format!("held / in use in {}", steps_text(&pair.now));
                worse.push(rise(&what, Pair { before, now }));
            }
        }
        worse.into_iter().flatten().collect()
    }
}

/// A figure of a run's device.
type Amount = fn(&RunDevice) -> u64;

fn steps_text(steps: &Steps) -> String {
    match (steps.first, steps.last) {
        (first, last) if first == last => format!("step {first}"),
        (first, last) => format!("steps {first} to {last}"),
    }
}

fn about(run: &Run) -> Value {
    json!({
        "name": run.name,
        "pid": run.pid,
        "host": run.host,
        "rank": run.rank,
        "world_size": run.world_size,
        "command": run.command,
        "configuration": run.configuration,
        "gruyere": run.gruyere,
        "started_nanoseconds": run.started_nanoseconds,
        "unfinished_at_nanoseconds": run.unfinished_at_nanoseconds,
        "driver_calls": run.driver_call_times,
    })
}

fn device_value(run: &RunDevice) -> Value {
    json!({
        "live_peak_bytes": run.live_peak_bytes,
        "reserved_peak_bytes": run.reserved_peak_bytes,
        "peak_ratio": run.peak_ratio(),
        "mallocs": run.mallocs,
        "driver_calls": run.driver_calls,
        "retries": run.retries,
        "out_of_memories": run.out_of_memories,
        "steps": run.steps,
        "lines": run.lines,
    })
}

fn value(now: &Run, before: Option<&Run>, comparisons: &[Comparison], worse: &[String]) -> Value {
    let steps = |steps: &Steps| {
        json!({
            "in_use_bytes": steps.in_use, "reserved_bytes": steps.reserved,
            "ratio": steps.ratio()
        })
    };
    let device = |comparison: &Comparison| {
        let by_step: Vec<Value> = comparison
            .steps
            .iter()
            .map(|pair| {
                json!({
                    "first": pair.now.first,
                    "last": pair.now.last,
                    "now": steps(&pair.now),
                    "before": pair.before.as_ref().map(steps),
                })
            })
            .collect();
        json!({
            "device": comparison.now.device,
            "before_device": comparison.before.map(|before| before.device),
            "name": comparison.now.name,
            "now": device_value(comparison.now),
            "before": comparison.before.map(device_value),
            "by_step": by_step,
        })
    };
    json!({
        "run": about(now),
        "against": before.map(about),
        "devices": comparisons.iter().map(device).collect::<Vec<_>>(),
        "worse": worse,
    })
}

/// Live memory by line of the program at the end of both runs, ordered by the current one; lines
/// with the same text are the same.
fn lines_table(comparison: &Comparison) -> Vec<String> {
    let before = comparison.before.map_or(&[][..], |before| &before.lines);
    let now = &comparison.now.lines;
    if before.is_empty() && now.is_empty() {
        return Vec::new();
    }
    let held = |lines: &[Line], name: &str| {
        let of_it = lines.iter().filter(|line| line.name == name);
        of_it.map(|line| line.live_bytes).reduce(u64::saturating_add)
    };
    let gone = before.iter().filter(|line| held(now, &line.name).is_none());
    let mut names: Vec<&str> = now.iter().chain(gone).map(|line| line.name.as_str()).collect();
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(*name));
    let row = |name: &str| {
        let (before, after) = (held(before, name), held(now, name));
        // A line outside the ten largest is unknown.
        let amount = |amount: Option<u64>| amount.map_or_else(|| "-".to_owned(), bytes);
        let change = match (before, after) {
            (Some(before @ 1..), Some(after)) => percent(after as f64 / before as f64 - 1.0),
            _ => String::new(),
        };
        let name = plain(name);
        format!("  {name:<26} {:>12} {:>12} {change:>9}", amount(before), amount(after))
    };
    let mut table = vec![String::new(), "  live at the end, by line".to_owned()];
    table.extend(names.into_iter().map(row));
    table
}

/// Below the names of the runs.
const INDENT: &str = "         ";

fn text(now: &Run, before: Option<&Run>, comparisons: &[Comparison]) -> String {
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments| {
        let _ = writeln!(out, "{text}");
    };
    let who = |run: &Run| {
        let rank = run.rank.map_or(String::new(), |rank| format!(", rank {rank}"));
        let started = when(run.started_nanoseconds);
        format!("{} of {started} (pid {} on {}{rank})", plain(&run.name), run.pid, plain(&run.host))
    };
    let so_far = |run: &Run| -> String {
        let said = unfinished(run).map(|written| {
            format!(
                "{written}: it was killed, or still runs. What it did later is missing here; \
                 `gruyere report {}` has it, while its record is there",
                run.pid
            )
        });
        let lines = said.iter().flat_map(|said| wrap(said, 80 - INDENT.len(), ""));
        lines.map(|line| format!("\n{INDENT}{line}")).collect()
    };
    line(format_args!("run      {}{}", who(now), so_far(now)));
    match before {
        Some(before) => {
            line(format_args!("against  {}{}", who(before), so_far(before)));
            if before.configuration != now.configuration {
                let (before, now) = (plain(&before.configuration), plain(&now.configuration));
                line(format_args!("         with another configuration: {before:?}, now {now:?}"));
            }
        }
        None => line(format_args!("against  nothing: there is no earlier run")),
    }
    for comparison in comparisons {
        let run = comparison.now;
        line(format_args!("\n{} {}", comparison.name(), plain(&run.name)));
        line(format_args!("  {:<26} {:>12} {:>12} {:>9}", "", "BEFORE", "NOW", "CHANGE"));
        let mut row = |name: &str, before: Option<String>, now: String, change: Option<String>| {
            let (before, change) =
                (before.unwrap_or_else(|| "-".into()), change.unwrap_or_default());
            line(format_args!("  {name:<26} {before:>12} {now:>12} {change:>9}"));
        };
        let ratio = |ratio: f64| format!("{ratio:.4}");
        let rise = |rise: f64| format!("{rise:+.4}");
        let amounts: [(&str, Amount); 2] = [
            ("live at the peak", |run| run.live_peak_bytes),
            ("held at the peak", |run| run.reserved_peak_bytes),
        ];
        for (name, of) in amounts {
            let pair = comparison.pair(of);
            row(name, pair.before.map(bytes), bytes(pair.now), pair.growth().map(percent));
        }
        if let Some(pair) = comparison.ratios(RunDevice::peak_ratio) {
            let (before, now) = (pair.before.map(ratio), ratio(pair.now));
            row("peak ratio (held / live)", before, now, pair.rise().map(rise));
        }
        let counts: [(&str, Amount); 4] = [
            ("steps", |run| run.steps),
            ("driver calls", |run| run.driver_calls),
            ("requests after a retry", |run| run.retries),
            ("out of memory", |run| run.out_of_memories),
        ];
        for (name, of) in counts {
            let pair = comparison.pair(of);
            row(name, pair.before.map(|count| count.to_string()), pair.now.to_string(), None);
        }
        for row in lines_table(comparison) {
            line(format_args!("{row}"));
        }
        if comparison.steps.is_empty() {
            let has_steps = |run: &RunDevice| run.steps > 0;
            let why = match has_steps(run) && comparison.before.is_none_or(has_steps) {
                true => "too few steps were marked",
                false => "no step was marked",
            };
            let by_then = if now.unfinished_at_nanoseconds.is_some() { " by then" } else { "" };
            line(format_args!("  {why}{by_then}, so there are no figures by step"));
            continue;
        }
        let head = ["IN USE", "HELD", "RATIO", "IN USE", "HELD", "RATIO"];
        let [a, b, c, d, e, f] = head;
        // 80 columns.
        line(format_args!("\n  {:<16} {:>29}   {:>29}", "", "BEFORE", "NOW"));
        line(format_args!("  {:<16} {a:>11} {b:>11} {c:>5}   {d:>11} {e:>11} {f:>5}", "STEPS"));
        for pair in &comparison.steps {
            let cells = |steps: Option<&Steps>| match steps {
                Some(steps) => {
                    let ratio =
                        steps.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
                    format!("{:>11} {:>11} {ratio:>5}", bytes(steps.in_use), bytes(steps.reserved))
                }
                None => format!("{:>11} {:>11} {:>5}", "-", "-", "-"),
            };
            let name = steps_text(&pair.now);
            line(format_args!(
                "  {name:<16} {}   {}",
                cells(pair.before.as_ref()),
                cells(Some(&pair.now))
            ));
        }
    }
    for (name, run) in [("before", before), ("now", Some(now))] {
        let rows = run.map_or_else(Vec::new, |run| driver_calls::table(&run.driver_call_times));
        for (at, row) in rows.into_iter().enumerate() {
            if at == 0 {
                line(format_args!("\ndriver calls, {name}"));
            }
            line(format_args!("  {row}"));
        }
    }
    out
}
