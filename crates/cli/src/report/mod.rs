//! `gruyere report`: a run, compared with an earlier one of the same name.

mod bounds;
mod dry;
mod files;
mod runs;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::{Ended, Exit, Failure, say};
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
                                    keeps what the run did, under the name
                                    `train`
  gruyere report --history /var/lib/gruyere --name train
                                    its latest run, compared with the one before
  gruyere report 4242 --against runs/train.rank0.1763763600-31.run.json
                                    a process that runs now, or its record,
                                    against a kept run
  gruyere report dry.json --against dry-of-main.json --max-growth 2%
                                    two dry runs (`gruyere dryrun
                                    --json=dry.json`, or --history)
  gruyere report 4242 --against dry.json
                                    what a GPU took, beside what the dry run
                                    said
  gruyere report --history runs --name train --max-growth 2% --max-ratio 1%
                                    for continuous integration: exit code 4
                                    where it got worse than that

A run is the file that `history:` makes, a process, or the file of its record. Steps are those \
that the program (or an optimiser) marks; they are compared as far as both runs went. In use: \
blocks above 1 MiB, and slabs. Ratio: held / in use, both at their highest in these steps; peak \
ratio: held / live, both at their highest in the run (1 is the least there can be).

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
        (None, None) => return Err(Failure::new("name a run, or a folder with --history")),
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
            format_args!("no earlier {kind} of {name:?} to compare with: the bounds say nothing"),
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
        "{folder}: no run of {of}; runs are kept where GRUYERE_CONF has history:{folder}, and by \
         gruyere dryrun --history {folder}"
    ))
}

/// A time (nanoseconds since 1970), for people.
fn when(nanoseconds: u64) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(nanoseconds))
        .map_or_else(|_| "at an unknown time".to_owned(), |time| format!("{time:.0}"))
}
