//! `gruyere report`: a run, and how it compares with an earlier one of the same name.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use gruyere_record::plain;
use gruyere_record::run::{self, Run, RunDevice, Steps};
use gruyere_record::sites::Line;
use indicatif::BinaryBytes;
use serde_json::{Value, json};

use crate::driver_calls;
use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::target::{Folder, Target};

/// Compares a run's peaks and their ratio, by step, with those of an earlier run of the same
/// name.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  GRUYERE_CONF=history:/var/lib/gruyere python -m gruyere train.py
                                        keeps what the run did, under the name `train`
  gruyere report --history /var/lib/gruyere --name train
                                        its latest run, compared with the one before
  gruyere report 4242 --against /var/lib/gruyere/train.rank0.1763763600-31.run.json
                                        a process that runs now, or its record, against a kept run
  gruyere report --history runs --name train --max-growth 2% --max-ratio 1%
                                        for continuous integration: exit code 4 where it got worse \
                                        than that

A run is the file that `history:` makes, a process, or the file of its record. Steps are those \
that the program (or an optimiser) marks;
they are compared as far as both runs went. In use: blocks above 1 MiB, and slabs. Ratio: \
held / in use, both at their
highest in these steps; peak ratio: held / live, both at their highest in the run (1 is the \
least there can be).

Exit codes: 0 all well; 1 a run is missing or can't be read; 2 wrong usage; 4 it got worse than a \
bound.")]
pub struct Arguments {
    /// The run: a file of the history, a process, or the file of its record. Without it: the latest
    /// of --name in --history.
    #[arg(value_name = "RUN|PID|FILE", required_unless_present = "history")]
    run: Option<String>,
    /// The run to compare with, as RUN. Without it: the latest earlier one of the same name and
    /// rank in --history, if that is given.
    #[arg(long, value_name = "RUN|PID|FILE")]
    against: Option<String>,
    /// The folder that `history:` names.
    #[arg(long, value_name = "FOLDER")]
    history: Option<PathBuf>,
    /// The name of the runs in it.
    #[arg(long, value_name = "NAME", requires = "history")]
    name: Option<String>,
    /// The rank of the runs in it.
    #[arg(long, value_name = "RANK", default_value_t = 0, requires = "history")]
    rank: u64,
    /// Worse: more was held, or in use, at the peak or in any steps, by more than this share of
    /// what it was.
    #[arg(long, value_name = "PERCENT")]
    max_growth: Option<Share>,
    /// Worse: the peak ratio (held / live), or held / in use in any steps, rose by more than this
    /// (1.05 to 1.065 is 1.5%).
    #[arg(long, value_name = "PERCENT")]
    max_ratio: Option<Share>,
    /// How many parts the steps are told in.
    #[arg(
        long, value_name = "COUNT", default_value_t = 16,
        value_parser = clap::value_parser!(u64).range(1..=4096)
    )]
    parts: u64,
    /// Print JSON. Bytes are bytes, shares are of 1.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

/// A share of 1, written as percent.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share(f64);

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Share, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
        let number = number.filter(|number| number.is_finite() && *number >= 0.0);
        number
            .map(|number| Share(number / 100.0))
            .ok_or_else(|| "expected a percentage, as in 2%".to_owned())
    }
}

/// What was and what is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Pair<T> {
    before: Option<T>,
    now: T,
}

impl Pair<u64> {
    /// By how much of what it was it grew; `None` where there is nothing to compare with.
    fn growth(self) -> Option<f64> {
        let before = self.before.filter(|&before| before > 0)?;
        Some(self.now as f64 / before as f64 - 1.0)
    }
}

impl Pair<f64> {
    fn rise(self) -> Option<f64> {
        Some(self.now - self.before?)
    }
}

/// A device of the run, beside that of the earlier one.
struct Comparison<'a> {
    now: &'a RunDevice,
    before: Option<&'a RunDevice>,
    /// What both say of the same steps.
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

    fn ratios(&self, of: impl Fn(&RunDevice) -> Option<f64>) -> Option<Pair<f64>> {
        Some(Pair { before: self.before.and_then(&of), now: of(self.now)? })
    }

    fn pair<T>(&self, of: impl Fn(&RunDevice) -> T) -> Pair<T> {
        Pair { before: self.before.map(&of), now: of(self.now) }
    }

    /// What got worse than the bounds, in words.
    fn worse(&self, growth: Option<Share>, ratio: Option<Share>) -> Vec<String> {
        let device = self.now.device;
        let mut worse = Vec::new();
        let mut look_at_growth = |what: String, pair: Pair<u64>| {
            if let (Some(Share(bound)), Some(grew)) = (growth, pair.growth())
                && grew > bound
            {
                let (before, now) = (bytes(pair.before.unwrap_or(0)), bytes(pair.now));
                worse.push(format!(
                    "device {device}: {what} grew by {:.2}% ({before} to {now}; bound {:.2}%)",
                    grew * 100.0,
                    bound * 100.0
                ));
            }
        };
        look_at_growth("held at the peak".into(), self.pair(|run| run.reserved_peak_bytes));
        look_at_growth("live at the peak".into(), self.pair(|run| run.live_peak_bytes));
        for pair in &self.steps {
            let of = |field: fn(&Steps) -> u64| Pair {
                before: pair.before.as_ref().map(field),
                now: field(&pair.now),
            };
            let steps = steps_text(&pair.now);
            look_at_growth(format!("held in {steps}"), of(|steps| steps.reserved));
            look_at_growth(format!("in use in {steps}"), of(|steps| steps.in_use));
        }
        let mut look_at_ratio = |what: String, pair: Pair<f64>| {
            if let (Some(Share(bound)), Some(rise)) = (ratio, pair.rise())
                && rise > bound
            {
                let (before, now) = (pair.before.unwrap_or(0.0), pair.now);
                worse.push(format!(
                    "device {device}: {what} rose from {before:.4} to {now:.4} (bound +{bound:.4})"
                ));
            }
        };
        if let Some(pair) = self.ratios(RunDevice::peak_ratio) {
            look_at_ratio("the peak ratio".into(), pair);
        }
        for pair in &self.steps {
            if let Some(now) = pair.now.ratio() {
                let before = pair.before.as_ref().and_then(Steps::ratio);
                let what = format!("held / in use in {}", steps_text(&pair.now));
                look_at_ratio(what, Pair { before, now });
            }
        }
        worse
    }
}

/// A number of a device of a run.
type Amount = fn(&RunDevice) -> u64;

/// Runs it.
pub fn run(arguments: &Arguments) -> Ended {
    let now = match (&arguments.run, &arguments.history) {
        (Some(run), _) => load(run, &arguments.folder)?,
        (None, Some(history)) => latest(history, arguments.name.as_deref(), arguments.rank, None)?
            .ok_or_else(|| no_run(history, arguments))?,
        (None, None) => return Err(Failure::new("name a run, or a folder with --history")),
    };
    let before = match (&arguments.against, &arguments.history) {
        (Some(run), _) => Some(load(run, &arguments.folder)?),
        (None, Some(history)) => {
            latest(history, Some(&now.name), now.rank.unwrap_or(0), Some(&now))?
        }
        (None, None) => None,
    };
    if before.is_none() && (arguments.max_growth.is_some() || arguments.max_ratio.is_some()) {
        say(
            "report",
            format_args!(
                "no earlier run of {:?} to compare with: the bounds say nothing",
                now.name
            ),
        );
    }
    let comparisons: Vec<Comparison> = now
        .devices
        .iter()
        .map(|device| {
            let same = |other: &&RunDevice| other.device == device.device;
            let before = before.as_ref().and_then(|before| before.devices.iter().find(same));
            Comparison::new(device, before, arguments.parts)
        })
        .collect();
    let worse: Vec<String> = comparisons
        .iter()
        .flat_map(|comparison| comparison.worse(arguments.max_growth, arguments.max_ratio))
        .collect();
    let text = if arguments.json {
        format!("{:#}", value(&now, before.as_ref(), &comparisons, &worse))
    } else {
        text(&now, before.as_ref(), &comparisons, &worse)
    };
    output::print(format_args!("{}\n", text.trim_end()))?;
    Ok(if worse.is_empty() { Exit::Fine } else { Exit::Past })
}

fn no_run(history: &Path, arguments: &Arguments) -> Failure {
    let (folder, rank) = (history.display(), arguments.rank);
    match &arguments.name {
        Some(name) => Failure::new(format_args!(
            "{folder}: no run of {name:?}, rank {rank}; runs are kept where GRUYERE_CONF has \
             history:{folder}"
        )),
        None => Failure::new(format_args!(
            "{folder}: no run of rank {rank}; runs are kept where GRUYERE_CONF has history:{folder}"
        )),
    }
}

/// The run that `name` names.
fn load(name: &str, folder: &Folder) -> Result<Run, Failure> {
    if name.ends_with(run::FILE_SUFFIX) {
        return read(Path::new(name));
    }
    let target = Target { target: Some(name.to_owned()), folder: folder.clone() };
    let reader = target.open()?;
    let run = Run::of(&reader, None).with_lines(&reader);
    reader.expect_sound()?;
    Ok(run)
}

/// No file of ours is near it.
const MOST_BYTES: u64 = 64 << 20;

fn read(path: &Path) -> Result<Run, Failure> {
    let name = path.display();
    let fail = |reason: &dyn std::fmt::Display, remedy: &str| {
        Failure::new(format_args!("{name}: {reason}; {remedy}"))
    };
    let file =
        fs::metadata(path).map_err(|error| fail(&error, "name a file that `history:` made"))?;
    if !file.is_file() || file.len() > MOST_BYTES {
        return Err(fail(&"not the history of a run", "name a file that `history:` made"));
    }
    let text = fs::read_to_string(path)
        .map_err(|error| fail(&error, "name a file that `history:` made"))?;
    let run: Run = serde_json::from_str(&text).map_err(|error| {
        fail(&format_args!("not the history of a run ({error})"), "delete it, or name another")
    })?;
    if run.schema != run::SCHEMA || run.version != run::VERSION {
        let (schema, version) = (&run.schema, run.version);
        let reason = format!(
            "{schema:?} of version {version}, this command reads {:?} of version {}",
            run::SCHEMA,
            run::VERSION
        );
        return Err(fail(&reason, "use the command of the version that wrote it"));
    }
    Ok(run)
}

/// The latest run of `name` (any, where none is given) and `rank` in the folder; of those before
/// `before`, where that is given.
fn latest(
    history: &Path,
    name: Option<&str>,
    rank: u64,
    before: Option<&Run>,
) -> Result<Option<Run>, Failure> {
    let folder = history.display();
    let entries = fs::read_dir(history).map_err(|error| {
        Failure::new(format_args!(
            "{folder}: {error}; name the folder that `history:` names with --history"
        ))
    })?;
    let files = entries.flatten().map(|entry| entry.path()).filter(|file| {
        let file = file.file_name().unwrap_or_default().to_string_lossy();
        name.is_none_or(|name| file.starts_with(&format!("{name}.rank{rank}.")))
    });
    let mut best: Option<Run> = None;
    for run in readable(files, "report") {
        let is_wanted = name.is_none_or(|name| run.name == name) && run.rank.unwrap_or(0) == rank;
        let is_before = before.is_none_or(|other| moment(&run) < moment(other));
        if is_wanted && is_before && best.as_ref().is_none_or(|best| moment(&run) > moment(best)) {
            best = Some(run);
        }
    }
    Ok(best)
}

/// The runs of a folder, in no order, for the command `command`; none where there is no such
/// folder.
pub fn runs(history: &Path, command: &'static str) -> Vec<Run> {
    let entries = fs::read_dir(history).into_iter().flatten().flatten();
    readable(entries.map(|entry| entry.path()), command).collect()
}

/// Those of `files` that are runs. One that is damaged does not stand in the way of the others.
fn readable(
    files: impl Iterator<Item = PathBuf>,
    command: &'static str,
) -> impl Iterator<Item = Run> {
    let is_run = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with('.') && name.ends_with(run::FILE_SUFFIX)
    };
    files.filter(is_run).filter_map(move |file| match read(&file) {
        Ok(run) => Some(run),
        Err(failure) => {
            say(command, format_args!("passed over: {failure}"));
            None
        }
    })
}

/// Runs in the order of time.
fn moment(run: &Run) -> (u64, u64) {
    (run.started_nanoseconds, run.pid)
}

fn steps_text(steps: &Steps) -> String {
    match (steps.first, steps.last) {
        (first, last) if first == last => format!("step {first}"),
        (first, last) => format!("steps {first} to {last}"),
    }
}

fn bytes(value: u64) -> String {
    BinaryBytes(value).to_string()
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

/// What the lines of the program held at the end of both runs, by what they hold now; lines are the
/// same where they are written alike.
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
        // Of a line that is not among the ten, nothing is known.
        let amount = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), self::bytes);
        let change = match (before, after) {
            (Some(before @ 1..), Some(after)) => {
                format!("{:+.2}%", (after as f64 / before as f64 - 1.0) * 100.0)
            }
            _ => String::new(),
        };
        let name = plain(name);
        format!("  {name:<26} {:>12} {:>12} {change:>9}", amount(before), amount(after))
    };
    let mut table = vec![String::new(), "  live at the end, by line".to_owned()];
    table.extend(names.into_iter().map(row));
    table
}

fn text(now: &Run, before: Option<&Run>, comparisons: &[Comparison], worse: &[String]) -> String {
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments| {
        let _ = writeln!(out, "{text}");
    };
    let who = |run: &Run| {
        let rank = run.rank.map_or(String::new(), |rank| format!(", rank {rank}"));
        let started = jiff::Timestamp::from_nanosecond(i128::from(run.started_nanoseconds))
            .map_or_else(|_| "at an unknown time".to_owned(), |time| format!("{time:.0}"));
        format!("{} of {started} (pid {} on {}{rank})", plain(&run.name), run.pid, plain(&run.host))
    };
    line(format_args!("run      {}", who(now)));
    match before {
        Some(before) => {
            line(format_args!("against  {}", who(before)));
            if before.configuration != now.configuration {
                let (before, now) = (plain(&before.configuration), plain(&now.configuration));
                line(format_args!("         with another configuration: {before:?}, now {now:?}"));
            }
        }
        None => line(format_args!("against  nothing: there is no earlier run")),
    }
    for comparison in comparisons {
        let run = comparison.now;
        line(format_args!("\ndevice {} {}", run.device, plain(&run.name)));
        line(format_args!("  {:<26} {:>12} {:>12} {:>9}", "", "BEFORE", "NOW", "CHANGE"));
        let mut row = |name: &str, before: Option<String>, now: String, change: Option<String>| {
            let (before, change) =
                (before.unwrap_or_else(|| "-".into()), change.unwrap_or_default());
            line(format_args!("  {name:<26} {before:>12} {now:>12} {change:>9}"));
        };
        let ratio = |ratio: f64| format!("{ratio:.4}");
        let rise = |rise: f64| format!("{rise:+.4}");
        let change = |share: f64| format!("{:+.2}%", share * 100.0);
        let amounts: [(&str, Amount); 2] = [
            ("live at the peak", |run| run.live_peak_bytes),
            ("held at the peak", |run| run.reserved_peak_bytes),
        ];
        for (name, of) in amounts {
            let pair = comparison.pair(of);
            row(name, pair.before.map(bytes), bytes(pair.now), pair.growth().map(change));
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
            line(format_args!("  no step was marked, so nothing is told by step"));
            continue;
        }
        let head = ["IN USE", "HELD", "RATIO", "IN USE", "HELD", "RATIO"];
        let [a, b, c, d, e, f] = head;
        line(format_args!("\n  {:<18} {:>32}   {:>32}", "", "BEFORE", "NOW"));
        line(format_args!("  {:<18} {a:>12} {b:>12} {c:>6}   {d:>12} {e:>12} {f:>6}", "STEPS"));
        for pair in &comparison.steps {
            let cells = |steps: Option<&Steps>| match steps {
                Some(steps) => {
                    let ratio =
                        steps.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
                    format!("{:>12} {:>12} {ratio:>6}", bytes(steps.in_use), bytes(steps.reserved))
                }
                None => format!("{:>12} {:>12} {:>6}", "-", "-", "-"),
            };
            let name = steps_text(&pair.now);
            line(format_args!(
                "  {name:<18} {}   {}",
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
    if !worse.is_empty() {
        line(format_args!("\nworse than the bounds:"));
        for what in worse {
            line(format_args!("  {what}"));
        }
    }
    out
}
