//! `gruyere snapshot`: the state of a process's memory, in the format of PyTorch's viewers.

use std::io::Write;
use std::path::PathBuf;

use gruyere_record::dump::from_record;
use gruyere_record::dump::{self, state::State};
use gruyere_record::file;

use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::target::Target;

/// Writes a snapshot of a process's memory, living or killed, for PyTorch's memory_viz.
///
/// It reads the process's record from outside; the process never waits. The file has the format of
/// `torch.cuda.memory._dump_snapshot`: open it at pytorch.org/memory_viz, or with `python -m
/// torch.cuda._memory_viz`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere snapshot 4242 -o now.pickle
  python -m torch.cuda._memory_viz trace_plot now.pickle -o now.html
  gruyere snapshot 4242 --json -o before.json     for `gruyere diff`
  gruyere snapshot 4242 --json -o - | jq '.devices[0].held'

A block's first stack frame is what Gruyère knows of it: its lifetime or the phase of the program, \
the module, and the step of its allocation. The frames after it are the call stack, if `blame:` \
keeps it. Streams are numbers of the record, not handles. The trace is what the record still has \
of the latest events (`ring_events:`).

Exit codes: 0 success; 1 no such process or record, or it can't be read, or the file can't be \
written; 2 wrong usage; 3 written, but some entries of the record could not be read in full or are \
inconsistent, or it had no room for some live blocks.")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The file to write; `-`: standard output.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Write JSON, as out-of-memory dumps have it (docs/schema/oom-dump.json), instead of a pickle.
    #[arg(long)]
    json: bool,
    /// Write at most this many events, the latest ones.
    #[arg(long, value_name = "COUNT", default_value_t = 1 << 18)]
    events: usize,
}

pub fn run(arguments: &Arguments) -> Ended {
    let reader = arguments.target.open()?;
    let state = from_record::state(&reader, arguments.events);
    reader.expect_sound()?;
    let torn: u64 = state.devices.iter().map(|device| device.torn).sum();
    write(&state, arguments)?;
    if torn > 0 {
        say(
            "snapshot",
            format_args!(
                "{torn} entries of the record could not be read in full, or are inconsistent"
            ),
        );
    }
    let unrecorded = state.unrecorded();
    if let Some(said) = &unrecorded {
        say("snapshot", said);
    }
    Ok(if torn > 0 || unrecorded.is_some() { Exit::Torn } else { Exit::Fine })
}

fn write(state: &State, arguments: &Arguments) -> Result<(), Failure> {
    let form = |out: &mut dyn Write| match arguments.json {
        true => dump::write_json(out, state),
        false => dump::write_snapshot(out, state),
    };
    let path = arguments.output.display();
    if output::is_stdout(&arguments.output) {
        return output::write(form).map(drop);
    }
    file::replace(&arguments.output, u64::MAX, file::PRIVATE, form).map_err(|error| {
        Failure::new(format_args!(
            "{path} could not be written: {error}; name a file in a folder with free space, with -o"
        ))
    })
}
