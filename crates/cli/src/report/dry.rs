//! Results of `gruyere dryrun`, compared with earlier ones, or with a run on a GPU.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use gruyere_record::held::peak_ratio;
use gruyere_record::plain;
use gruyere_record::run::{Run, shown_command};
use serde::Deserialize;
use serde_json::{Value, json};

use super::bounds::{Bounds, Pair, percent};
use super::files::Kept;
use super::{Compared, unfinished, when};
use crate::amounts::bytes;

/// Value of [`DryRun::schema`].
pub const SCHEMA: &str = "gruyere.dryrun";
/// Value of [`DryRun::version`].
pub const VERSION: u32 = 1;
/// File name suffix in `--history`.
pub const FILE_SUFFIX: &str = ".dryrun.json";
/// Our own allocator's name in rows of a dry run.
const OURS: &str = "gruyere";
/// The most lines of the program to show; the JSON has all.
const LINES: usize = 10;

/// The part of a `gruyere dryrun` result that we read. The package writes it
/// (`_dryrun/report.py`; docs/dryrun.md has all of it); a test reads an answer of the package's.
#[derive(Debug, Deserialize)]
pub struct DryRun {
    pub run: Who,
    program: Program,
    machine: Machine,
    gpus: Vec<Gpu>,
    /// Of the examined run; `None` if it had no steps.
    peak: Option<Peak>,
    trust: Trust,
}

/// Identity of the run.
#[derive(Debug, Deserialize)]
pub struct Who {
    pub name: String,
    pub pid: u64,
    pub host: String,
    pub started_nanoseconds: u64,
}

#[derive(Debug, Deserialize)]
struct Program {
    command: String,
    steps: u64,
}

#[derive(Debug, Deserialize)]
struct Machine {
    torch: String,
}

#[derive(Debug, Deserialize)]
struct Gpu {
    id: String,
    /// The driver's name of the GPU.
    name: String,
    runs: Vec<Row>,
}

/// A GPU under one allocator.
#[derive(Debug, Deserialize)]
struct Row {
    allocator: String,
    fits: bool,
    /// The program's own words if it failed. There are no peaks then.
    failed: bool,
    peak_live: Option<u64>,
    peak_held: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Peak {
    kinds: BTreeMap<String, u64>,
    lines: Vec<Line>,
}

#[derive(Debug, Deserialize)]
struct Line {
    line: String,
    bytes: u64,
}

#[derive(Debug, Deserialize)]
struct Trust {
    reasons: Vec<String>,
}

/// Peaks under an allocator: on a GPU of a dry run, or on a device of a run.
struct Peaks<'a> {
    gpu: &'a str,
    /// The driver's name of the GPU.
    name: &'a str,
    allocator: &'a str,
    /// Absent for a run on a GPU, which fitted.
    fits: Option<bool>,
    live: u64,
    held: u64,
}

impl Peaks<'_> {
    fn all(kept: &Kept) -> Vec<Peaks<'_>> {
        match kept {
            Kept::Dry(dry) => dry.gpus.iter().flat_map(of_gpu).collect(),
            Kept::Run(run) => run.devices.iter().map(of_device).collect(),
        }
    }

    fn ratio(&self) -> Option<f64> {
        peak_ratio(self.held, self.live)
    }

    fn value(&self) -> Value {
        json!({
            "gpu": self.gpu, "fits": self.fits, "peak_live": self.live, "peak_held": self.held,
            "peak_ratio": self.ratio(),
        })
    }
}

fn of_gpu(gpu: &Gpu) -> impl Iterator<Item = Peaks<'_>> {
    gpu.runs.iter().filter_map(|row| {
        Some(Peaks {
            gpu: &gpu.id,
            name: &gpu.name,
            allocator: &row.allocator,
            fits: Some(row.fits),
            live: row.peak_live?,
            held: row.peak_held?,
        })
    })
}

fn of_device(device: &gruyere_record::run::RunDevice) -> Peaks<'_> {
    Peaks {
        gpu: &device.name,
        name: &device.name,
        allocator: OURS,
        fits: None,
        live: device.live_peak_bytes,
        held: device.reserved_peak_bytes,
    }
}

/// The same allocator on the same GPU: by the requested name, else by the driver's name, which a
/// run has.
fn counterpart<'a>(of: &Peaks, among: &'a [Peaks<'a>]) -> Option<&'a Peaks<'a>> {
    let same = |other: &&Peaks| other.allocator == of.allocator;
    let asked = among.iter().filter(same).find(|other| other.gpu == of.gpu);
    let is_mixed = |other: &&Peaks| other.fits.is_some() != of.fits.is_some();
    let named = || among.iter().filter(same).filter(is_mixed).find(|other| other.name == of.name);
    asked.or_else(named)
}

/// Compares two results, at least one of them a dry run.
pub fn compare(now: &Kept, before: Option<&Kept>, bounds: Bounds) -> Compared {
    let rows = Peaks::all(now);
    let earlier = before.map_or_else(Vec::new, Peaks::all);
    let pairs: Vec<(&Peaks, Option<&Peaks>)> =
        rows.iter().map(|row| (row, counterpart(row, &earlier))).collect();
    let mut worse: Vec<String> = pairs.iter().flat_map(|pair| worse(pair, bounds)).collect();
    worse.extend(failures(now, &earlier));
    let kinds = amounts(now, before, |peak| {
        peak.kinds.iter().map(|(kind, &bytes)| (kind.as_str(), bytes)).collect()
    });
    let lines = amounts(now, before, |peak| {
        peak.lines.iter().map(|line| (line.line.as_str(), line.bytes)).collect()
    });
    let gpu = |(now, before): &(&Peaks, Option<&Peaks>)| {
        json!({
            "gpu": now.gpu, "allocator": now.allocator, "now": now.value(),
            "before": before.map(Peaks::value),
        })
    };
    let named = |(name, pair): &(&str, Pair<u64>)| {
        let Pair { before, now } = pair;
        json!({ "name": name, "now": now, "before": before })
    };
    let value = json!({
        "run": about(now),
        "against": before.map(about),
        "gpus": pairs.iter().map(gpu).collect::<Vec<_>>(),
        "kinds": kinds.iter().map(named).collect::<Vec<_>>(),
        "lines": lines.iter().map(named).collect::<Vec<_>>(),
        "worse": worse,
    });
    let mut text = head(now, before);
    for pair in &pairs {
        text += &of_pair(pair, before.is_some());
    }
    text += &table("live at the peak, by kind", &kinds);
    text += &table("live at the peak, by line", &lines[..lines.len().min(LINES)]);
    Compared { value, text, worse }
}

/// Regressions, in words. No longer fitting is worse than any bound.
fn worse((now, before): &(&Peaks, Option<&Peaks>), bounds: Bounds) -> Vec<String> {
    let Some(before) = before else { return Vec::new() };
    let whose = format!("{} under {}", plain(now.gpu), plain(now.allocator));
    let pair = |of: fn(&Peaks) -> u64| Pair { before: Some(of(before)), now: of(now) };
    let no_longer = before.fits == Some(true) && now.fits == Some(false);
    let ratio = now.ratio().map(|ratio| Pair { before: before.ratio(), now: ratio });
    let found = [
        no_longer.then(|| format!("{whose}: it no longer fits")),
        bounds.growth_of(&whose, "held at the peak", pair(|row| row.held)),
        bounds.growth_of(&whose, "live at the peak", pair(|row| row.live)),
        ratio.and_then(|ratio| bounds.rise_of(&whose, "the peak ratio", ratio)),
    ];
    found.into_iter().flatten().collect()
}

/// New failures of the program, by row.
fn failures(now: &Kept, earlier: &[Peaks]) -> Vec<String> {
    let Kept::Dry(dry) = now else { return Vec::new() };
    let rows = dry.gpus.iter().flat_map(|gpu| gpu.runs.iter().map(move |row| (gpu, row)));
    let failed = rows.filter(|(gpu, row)| {
        let same = |other: &Peaks| other.gpu == gpu.id && other.allocator == row.allocator;
        row.failed && earlier.iter().any(same)
    });
    let said = |(gpu, row): (&Gpu, &Row)| {
        format!("{} under {}: the program now fails there", plain(&gpu.id), plain(&row.allocator))
    };
    failed.map(said).collect()
}

/// Bytes by name of both, largest first. Only dry runs have a list of what was live at the peak;
/// for a run, this is empty.
fn amounts<'a>(
    now: &'a Kept,
    before: Option<&'a Kept>,
    of: impl Fn(&'a Peak) -> BTreeMap<&'a str, u64>,
) -> Vec<(&'a str, Pair<u64>)> {
    let peak = |kept: &'a Kept| match kept {
        Kept::Dry(dry) => dry.peak.as_ref().map(&of),
        Kept::Run(_) => None,
    };
    let Some(after) = peak(now) else { return Vec::new() };
    let before = before.and_then(peak);
    let names: BTreeSet<&str> =
        after.keys().chain(before.iter().flat_map(BTreeMap::keys)).copied().collect();
    let amount = |of: &BTreeMap<&str, u64>, name| of.get(name).copied().unwrap_or(0);
    let pair = |name| Pair {
        before: before.as_ref().map(|before| amount(before, name)),
        now: amount(&after, name),
    };
    let mut found: Vec<(&str, Pair<u64>)> =
        names.into_iter().map(|name| (name, pair(name))).collect();
    found.retain(|(_, pair)| pair.now > 0 || pair.before.is_some_and(|before| before > 0));
    found.sort_by_key(|(_, pair)| Reverse(pair.now.max(pair.before.unwrap_or(0))));
    found
}

fn about(kept: &Kept) -> Value {
    match kept {
        Kept::Dry(DryRun { run, program, machine, trust, .. }) => json!({
            "kind": kept.kind(), "name": run.name, "pid": run.pid, "host": run.host,
            "started_nanoseconds": run.started_nanoseconds, "command": program.command,
            "steps": program.steps, "torch": machine.torch, "doubts": trust.reasons,
        }),
        Kept::Run(run) => json!({
            "kind": kept.kind(), "name": run.name, "pid": run.pid, "host": run.host,
            "started_nanoseconds": run.started_nanoseconds, "command": run.command,
            "steps": steps(run),
        }),
    }
}

fn steps(run: &Run) -> u64 {
    run.devices.iter().map(|device| device.steps).max().unwrap_or(0)
}

fn head(now: &Kept, before: Option<&Kept>) -> String {
    let mut out = String::new();
    let mut line = |name: &str, kept: &Kept| {
        let (who, what) = match kept {
            Kept::Dry(dry) => (
                (&dry.run.host, dry.run.pid, dry.run.started_nanoseconds),
                format!(
                    "{}, {} steps, torch {}",
                    plain(&dry.program.command),
                    dry.program.steps,
                    plain(&dry.machine.torch)
                ),
            ),
            Kept::Run(run) => {
                let written = unfinished(run).map_or_else(String::new, |it| format!(", {it}"));
                let command = plain(&shown_command(&run.command));
                (
                    (&run.host, run.pid, run.started_nanoseconds),
                    format!("{command}, {} steps{written}", steps(run)),
                )
            }
        };
        let (host, pid, started) = who;
        let (name_of_run, host) = (plain(kept.name()), plain(host));
        let (kind, started) = (kept.kind(), when(started));
        let _ = writeln!(
            out,
            "{name:<8} {kind} {name_of_run} of {started} (pid {pid} on {host})\n         {what}"
        );
        if let Kept::Dry(dry) = kept {
            for reason in &dry.trust.reasons {
                let _ = writeln!(out, "         not trustworthy: {}", plain(reason));
            }
        }
    };
    line("run", now);
    match before {
        Some(before) => line("against", before),
        None => {
            let _ = writeln!(out, "against  nothing: there is no earlier {}", now.kind());
        }
    }
    out
}

fn of_pair((now, before): &(&Peaks, Option<&Peaks>), is_compared: bool) -> String {
    let mut out = format!("\n{} under {}", plain(now.gpu), plain(now.allocator));
    match before {
        Some(before) if before.gpu != now.gpu => {
            let _ = write!(out, ", against {}", plain(before.gpu));
        }
        None if is_compared => out += ": not in the earlier run",
        _ => {}
    }
    let _ = writeln!(out, "\n  {:<26} {:>12} {:>12} {:>9}", "", "BEFORE", "NOW", "CHANGE");
    let mut row = |name: &str, of: &dyn Fn(&Peaks) -> Option<String>, change: Option<String>| {
        let cell = |peaks: Option<&Peaks>| peaks.and_then(of).unwrap_or_else(|| "-".to_owned());
        let (before, now, change) = (cell(*before), cell(Some(now)), change.unwrap_or_default());
        let _ = writeln!(
            out,
            "{}",
            format!("  {name:<26} {before:>12} {now:>12} {change:>9}").trim_end()
        );
    };
    let growth =
        |of: fn(&Peaks) -> u64| Pair { before: before.map(of), now: of(now) }.growth().map(percent);
    let rise = before.and_then(Peaks::ratio).zip(now.ratio());
    let rise = rise.map(|(before, now)| format!("{:+.4}", now - before));
    let word = |fits| if fits { "yes" } else { "NO" }.to_owned();
    row("fits", &|of| of.fits.map(word), None);
    row("live at the peak", &|of| Some(bytes(of.live)), growth(|of| of.live));
    row("held at the peak", &|of| Some(bytes(of.held)), growth(|of| of.held));
    row("peak ratio (held / live)", &|of| of.ratio().map(|it| format!("{it:.4}")), rise);
    out
}

fn table(title: &str, rows: &[(&str, Pair<u64>)]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut out = format!("\n{title:<28} {:>12} {:>12} {:>9}\n", "BEFORE", "NOW", "CHANGE");
    for (name, pair) in rows {
        let before = pair.before.map_or_else(|| "-".to_owned(), bytes);
        let change = match pair.before {
            Some(0) => "new".to_owned(),
            Some(_) if pair.now == 0 => "gone".to_owned(),
            _ => pair.growth().map(percent).unwrap_or_default(),
        };
        let (name, now) = (plain(name), bytes(pair.now));
        let _ = writeln!(
            out,
            "{}",
            format!("  {name:<26} {before:>12} {now:>12} {change:>9}").trim_end()
        );
    }
    out
}
