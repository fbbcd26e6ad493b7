//! `gruyere report`: a run, compared with an earlier one of the same name.

mod bounds;
mod dry;
mod files;
mod runs;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use gruyere_record::run::Run;
use serde_json::Value;

use crate::failure::{Ended, Exit, Failure, say, wrong_usage};
use crate::output;
use crate::target::Folder;
use bounds::{Bounds, Share};
use files::{Kept, Wanted};

pub use files::runs;

/// Compares a run's peaks and their ratio, by step, with those of an earlier run of the same
/// name.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  GRUYERE_CONF=history:/var/lib/gruyere python -m gruyere train.py
                                    saves the figures of the run, under the name
                                    `train`
  gruyere report --history /var/lib/gruyere --name train
                                    its latest run, compared with the one before
  gruyere report 4242 --against runs/train.rank0.1763763600-31.run.json
                                    a process that runs now, or its record,
                                    against a saved run
  gruyere report dry.json --against dry-of-main.json --max-growth 2%
                                    two dry runs (`gruyere dryrun
                                    --json=dry.json`, or --history)
  gruyere report 4242 --against dry.json
                                    memory on a GPU, against the prediction of
                                    the dry run
  gruyere report --history runs --name train --max-growth 2% --max-ratio 1%
                                    for continuous integration: exit code 4 if
                                    the run is worse than a bound

A run is a file from `history:`, a process, or its record file. The program (or an optimiser) \
marks the steps; steps that both runs reached are compared. In use: blocks above 1 MiB, and slabs. \
Ratio: held / in use, both at their highest in these steps; peak ratio: held / live, both at their \
highest in the run (1 is the lowest possible).

Exit codes: 0 success; 1 a run is missing or can't be read; 2 wrong usage; 4 the run is worse than \
a bound.")]
pub struct Arguments {
    /// The run: a history file, a process, or its record file. Default: the latest run of --name in
    /// --history.
    #[arg(value_name = "RUN|PID|FILE")]
    run: Option<String>,
    /// The run to compare with, in the form of RUN. Default: the latest earlier run of the same
    /// name and rank in --history, if given.
    #[arg(long, value_name = "RUN|PID|FILE")]
    against: Option<String>,
    /// The folder of `history:`.
    #[arg(long, value_name = "FOLDER")]
    history: Option<PathBuf>,
    /// The name of the runs in that folder.
    #[arg(long, value_name = "NAME", requires = "history")]
    name: Option<String>,
    /// The rank of the runs in that folder.
    #[arg(long, value_name = "RANK", default_value_t = 0, requires = "history")]
    rank: u64,
    /// The run is worse if held or in-use memory, at the peak or in any steps, grew by more than
    /// this share.
    #[arg(long, value_name = "PERCENT")]
    max_growth: Option<Share>,
    /// The run is worse if the peak ratio (held / live), or held / in use in any steps, rose by
    /// more than this (1.05 to 1.065 is 1.5%).
    #[arg(long, value_name = "PERCENT")]
    max_ratio: Option<Share>,
    /// Number of parts to group the steps into.
    #[arg(
        long, value_name = "COUNT", default_value_t = 16,
        value_parser = clap::value_parser!(u64).range(1..=4096)
    )]
    parts: u64,
    /// Print JSON. Sizes are in bytes, shares are fractions of 1.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Result of a comparison.
struct Compared {
    value: Value,
    text: String,
    /// A sentence for each passed bound.
    worse: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Ended {
    let bounds = Bounds { growth: arguments.max_growth, ratio: arguments.max_ratio };
    let wanted = Wanted { name: arguments.name.as_deref(), rank: arguments.rank };
    let now = match (&arguments.run, &arguments.history) {
        (Some(run), _) => Kept::load(run, &arguments.folder)?,
        (None, Some(history)) => {
            files::latest(history, wanted)?.ok_or_else(|| no_run(history, arguments))?
        }
        (None, None) => wrong_usage(
            "report",
            ErrorKind::MissingRequiredArgument,
            "name a run, a pid or a record, or --history FOLDER (its latest run)",
        ),
    };
    let before = match (&arguments.against, &arguments.history) {
        (Some(run), _) => Some(Kept::load(run, &arguments.folder)?),
        (None, Some(history)) => files::before(history, &now)?,
        (None, None) => None,
    };
    if before.is_none() && bounds.is_any() {
        let (kind, name) = (now.kind(), now.name());
        say(
            "report",
            format_args!("no earlier {kind} of {name:?} to compare with: no bound is checked"),
        );
    }
    let compared = match (&now, &before) {
        (Kept::Run(now), None) => runs::compare(now, None, arguments.parts, bounds),
        (Kept::Run(now), Some(Kept::Run(before))) => {
            runs::compare(now, Some(before), arguments.parts, bounds)
        }
        (now, before) => dry::compare(now, before.as_ref(), bounds),
    };
    let text = if arguments.json {
        format!("{:#}", compared.value)
    } else {
        let mut text = compared.text;
        if !compared.worse.is_empty() {
            text += "\nworse than the bounds:\n";
        }
        for what in &compared.worse {
            let _ = writeln!(text, "  {what}");
        }
        text
    };
    output::print(format_args!("{}\n", text.trim_end()))?;
    Ok(if compared.worse.is_empty() { Exit::Fine } else { Exit::Past })
}

fn no_run(history: &Path, arguments: &Arguments) -> Failure {
    let (folder, rank) = (history.display(), arguments.rank);
    let of = arguments.name.as_ref().map_or_else(String::new, |name| format!("{name:?}, "));
    let of = format!("{of}rank {rank}");
    Failure::new(format_args!(
        "{folder}: no run of {of}; history:{folder} in GRUYERE_CONF saves runs there, and so does \
         gruyere dryrun --history {folder}"
    ))
}

/// When the file of a run was last written, if that was before the end of the process.
fn unfinished(run: &Run) -> Option<String> {
    let seconds = run.unfinished_at_nanoseconds? as f64 / 1e9;
    Some(format!("last written {seconds:.0} s into the run, before the end"))
}

/// A time (nanoseconds since 1970), for people.
fn when(nanoseconds: u64) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(nanoseconds))
        .map_or_else(|_| "at an unknown time".to_owned(), |time| format!("{time:.0}"))
}
