//! `gruyere diff`: new and gone blocks of a process's memory.

mod bound;
mod compare;

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use gruyere_record::dump::from_record;
use gruyere_record::dump::state::{self, State};
use gruyere_record::held::LOST;
use gruyere_record::size::BinaryBytes;
use gruyere_record::{counted, plain};
use serde_json::{Value, json};

use crate::amounts::growth;
use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::target::{Folder, Target};
use bound::Bound;
use compare::{Change, DeviceChange};

/// Compares two states of a process's memory, or the memory of two processes: growth in total and
/// by line, new blocks, gone blocks.
#[derive(clap::Args)]
#[command(after_help = "\
A and B are each a process (its pid), a record file, or a JSON file from `gruyere snapshot --json` \
or an out-of-memory dump (dump_dir:).

Examples:
  gruyere snapshot 4242 --json -o before.json
  gruyere diff before.json 4242         what changed since then
  gruyere diff before.json 4242 --json | jq '.devices[0].lines'
  gruyere diff monday.json tuesday.json --fail-if 'live>+1GiB'
  gruyere diff monday.json tuesday.json --fail-if 'held>+5%'

A block is the same in both if its address, size and allocation step are.

Bounds (--fail-if, may be repeated): METRIC>BOUND, where METRIC is live, held, pending or blocks, \
and BOUND is a size, a count (for blocks) or a share. With a plus, a bound applies to the growth \
from A to B; without, to B. Each device is checked separately.

Exit codes: 0 success; 1 A or B is missing or can't be read; 2 wrong usage; 3 some entries of a \
record could not be read in full, or it had no room for some live blocks; 4 a bound is passed.")]
pub struct Arguments {
    /// The earlier state.
    #[arg(value_name = "A")]
    before: String,
    /// The later state.
    #[arg(value_name = "B")]
    after: String,
    /// Exit with 4 if this bound is passed, as in 'live>+1GiB'; may be repeated.
    #[arg(long, value_name = "BOUND")]
    fail_if: Vec<Bound>,
    /// How many of the largest new and gone blocks to list.
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    largest: usize,
    /// Print JSON. Sizes are in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

pub fn run(arguments: &Arguments) -> Ended {
    let before = load(&arguments.before, &arguments.folder)?;
    let after = load(&arguments.after, &arguments.folder)?;
    let changes = compare::devices(&before, &after, arguments.largest);
    let passed: Vec<String> = changes
        .iter()
        .flat_map(|change| arguments.fail_if.iter().filter_map(|bound| bound.passed_by(change)))
        .collect();
    let text = match arguments.json {
        true => format!("{:#}\n", json(&before, &after, &changes, &passed)),
        false => text(&before, &after, &changes),
    };
    output::print(text)?;
    passed.iter().for_each(|passed| say("diff", format_args!("{passed}")));
    let mut unrecorded = false;
    for (name, state) in [(&arguments.before, &before), (&arguments.after, &after)] {
        if let Some(said) = state.unrecorded() {
            say("diff", format_args!("{}: {said}", plain(name)));
            unrecorded = true;
        }
    }
    let torn =
        [&before, &after].iter().any(|state| state.devices.iter().any(|device| device.torn > 0));
    Ok(match (passed.is_empty(), torn || unrecorded) {
        (false, _) => Exit::Past,
        (true, true) => Exit::Torn,
        (true, false) => Exit::Fine,
    })
}

/// The largest part read of a JSON file.
const MOST_BYTES: u64 = 4 << 30;

fn load(name: &str, folder: &Folder) -> Result<State, Failure> {
    let target = Target { target: Some(name.to_owned()), folder: folder.clone() };
    if name.parse::<u64>().is_err() && begins_with(Path::new(name), b"{") {
        return load_json(Path::new(name));
    }
    if begins_with(Path::new(name), b"\x80") {
        return Err(Failure::new(format_args!(
            "{name}: this is a pickle; write the snapshot as JSON with `gruyere snapshot --json`, \
             or name the JSON file beside the out-of-memory dump"
        )));
    }
    let reader = target.open()?;
    let state = from_record::state(&reader, 0);
    reader.expect_sound()?;
    Ok(state)
}

fn begins_with(path: &Path, bytes: &[u8]) -> bool {
    let regular = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let mut head = vec![0; bytes.len()];
    let read = regular.then(|| {
        std::fs::File::open(path).and_then(|mut file| io::Read::read_exact(&mut file, &mut head))
    });
    read.is_some_and(|read| read.is_ok()) && head == bytes
}

fn load_json(path: &Path) -> Result<State, Failure> {
    let name = path.display();
    let wrong = |reason: &dyn std::fmt::Display| {
        Failure::new(format_args!(
            "{name}: {reason}; name a file from `gruyere snapshot --json`, or the JSON of an \
             out-of-memory dump"
        ))
    };
    let file = std::fs::File::open(path).map_err(|error| wrong(&error))?;
    let file = io::Read::take(file, MOST_BYTES);
    let state: State =
        serde_json::from_reader(io::BufReader::new(file)).map_err(|error| wrong(&error))?;
    match (state.format.as_str(), state.version) {
        (state::FORMAT, state::VERSION) => Ok(state),
        (state::FORMAT, version) => Err(wrong(&format_args!(
            "format version {version}, but this command reads version {}",
            state::VERSION
        ))),
        _ => Err(wrong(&"not the state of a process's memory")),
    }
}

fn json(before: &State, after: &State, changes: &[DeviceChange], passed: &[String]) -> Value {
    let side = |state: &State| {
        json!({ "pid": state.process.pid, "rank": state.process.rank,
            "command": state.process.command,
                "time_nanoseconds": state.time_nanoseconds })
    };
    json!({
        "before": side(before), "after": side(after), "devices": changes, "passed_bounds": passed
    })
}

/// The most lines of the program in the text: those that changed most.
const MOST_LINES: usize = 8;
/// Columns of a row's name: the rest of 80.
const NAME: usize = 33;

/// A line of the program in a row: the end of its path says most.
fn end_of(line: &str) -> String {
    let line = line.replace(" in <module>", "");
    let excess = line.chars().count().saturating_sub(NAME);
    match excess {
        0 => line,
        excess => {
            let end: String = line.chars().skip(excess + 1).collect();
            // No part of a folder's name.
            let at = end.split_once(" in ").map_or(end.as_str(), |(path, _)| path).find('/');
            format!("…{}", &end[at.unwrap_or(0)..])
        }
    }
}

/// A line of the program in a sentence, as `gruyere post` names it: without folders.
fn short(line: &str) -> String {
    const BACKWARD: &str = "backward of ";
    let (head, place) = match line.strip_prefix(BACKWARD) {
        Some(place) => (BACKWARD, place),
        None => ("", line),
    };
    let (path, function) = place.split_at(place.find(" in ").unwrap_or(place.len()));
    let file = path.rsplit('/').next().unwrap_or(path);
    format!("{head}{file}{}", if function == " in <module>" { "" } else { function })
}

/// A change of bytes, with its sign.
fn signed(change: Change) -> String {
    match change.after.cmp(&change.before) {
        std::cmp::Ordering::Less => format!("-{}", BinaryBytes(change.before - change.after)),
        std::cmp::Ordering::Equal => "0 B".to_owned(),
        std::cmp::Ordering::Greater => format!("+{}", BinaryBytes(change.after - change.before)),
    }
}

/// A change of size in words: `grew by 38% (480.00 MiB)`.
fn in_words(change: Change) -> String {
    let bytes = BinaryBytes(change.before.abs_diff(change.after));
    let verb = match change.after.cmp(&change.before) {
        std::cmp::Ordering::Less => "shrank",
        std::cmp::Ordering::Equal => return format!("is the same ({})", BinaryBytes(change.after)),
        std::cmp::Ordering::Greater => "grew",
    };
    match growth(change.before, change.after) {
        Some(share) => format!("{verb} by {} ({bytes})", share.trim_start_matches(['+', '-'])),
        None => format!("{verb} from nothing to {bytes}"),
    }
}

/// Summary of a device: the growth of live and held memory, and the responsible line.
fn verdict(change: &DeviceChange) -> String {
    let (live, held) = (in_words(change.live), in_words(change.reserved));
    let mut said = format!("{}: live {live}, held {held}", change.name());
    let with = |(_, line): &&(String, Change)| match change.live.after > change.live.before {
        true => line.after > line.before,
        false => line.after < line.before,
    };
    if let Some((line, by)) = change.lines.iter().find(with) {
        let _ = write!(said, "\n  most by {}: {}", short(&plain(line)), signed(*by));
    }
    said
}

fn text(before: &State, after: &State, changes: &[DeviceChange]) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(out, "{text}");
    };
    for change in changes {
        line(format_args!("{}", verdict(change)));
    }
    let seconds = after.time_nanoseconds as f64 / 1e9 - before.time_nanoseconds as f64 / 1e9;
    let pids = [before.process.pid, after.process.pid];
    match pids[0] == pids[1] {
        true => line(format_args!("B is {seconds:.1} s after A")),
        false => line(format_args!(
            "B is {seconds:.1} s after A; two processes: {} and {}",
            pids[0], pids[1]
        )),
    }
    for change in changes {
        line(format_args!(
            "\n{:<width$} {:>11} {:>11} {:>12}",
            change.name(),
            "A",
            "B",
            "change",
            width = NAME + 2
        ));
        let mut row = |name: &str, change: Change| {
            let [a, b] = [change.before, change.after].map(|bytes| BinaryBytes(bytes).to_string());
            let share = growth(change.before, change.after).unwrap_or("new".to_owned());
            let name = end_of(name);
            line(format_args!("  {name:<NAME$} {a:>11} {b:>11} {:>12} {share:>7}", signed(change)));
        };
        row("live", change.live);
        row("held", change.reserved);
        row("freed, waits for streams", change.pending);
        row(LOST, change.partly_used);
        let grown = change.lines.iter().filter(|(_, change)| change.before != change.after);
        for (line, change) in grown.take(MOST_LINES) {
            row(&plain(line), *change);
        }
        for (title, classes) in change.tables() {
            for (name, change) in classes.iter().filter(|(_, change)| change.before != change.after)
            {
                row(&format!("{title} {}", plain(name)), *change);
            }
        }
        for (run, sum) in change.step_runs() {
            let alike = if run.rows > 1 && run.is_level() { ", alike" } else { "" };
            row(&format!("{}{alike}", run.steps()), sum);
        }
        for (title, blocks) in [("new", &change.new), ("gone", &change.gone)] {
            let bytes = BinaryBytes(blocks.bytes);
            line(format_args!("  {title}: {}, {bytes}", counted(blocks.blocks, "block")));
            for block in &blocks.largest {
                let step = block.step.map_or("?".to_owned(), |step| step.to_string());
                line(format_args!(
                    "    {:#014x} {:>12}  lifetime {}, step {step}",
                    block.address,
                    BinaryBytes(block.requested_bytes).to_string(),
                    plain(&block.lifetime)
                ));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_named_without_folders_or_by_whole_ones() {
        assert_eq!(short("/home/me/train.py:8 in step"), "train.py:8 in step");
        assert_eq!(short("backward of /home/me/train.py:8 in <module>"), "backward of train.py:8");
        assert_eq!(short("not known"), "not known");
        let cut = end_of("/home/me/a/very/long/path/of/folders/train.py:8");
        assert_eq!(cut, "…/long/path/of/folders/train.py:8");
        assert_eq!(end_of("/a/train.py:8 in <module>"), "/a/train.py:8");
    }
}
