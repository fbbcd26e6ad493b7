//! `gruyere record`: a trace of a running process, from its record.

mod follow;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use gruyere_record::Reader;
use gruyere_record::reader::{Cursor, Events};
use gruyere_record::{BlockState, EventKind, clock, trace::TraceFile};
use serde_json::json;

use crate::failure::{Ended, Exit, Failure};
use crate::output;
use crate::signals;
use crate::target::Target;
use follow::Follower;

/// Writes a trace of a running process, for `gruyere bench --trace` to replay.
///
/// It reads the process's record from outside; the process never waits. The events come from the
/// record's rings; a full ring drops its oldest events. Lost events are counted, marked in the
/// trace, and mended from the map of live blocks. For a trace without loss, start the program with
/// `python -m gruyere --trace FILE`, or with `trace:FILE` in the configuration of `gruyere run`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere record 4242 -o run.trace.zst  until the process ends, or Ctrl-C
  gruyere record 4242 -o run.trace.zst --for 30s
  gruyere bench --trace run.trace.zst   replay it under each allocator
  python -m gruyere --trace run-%p.trace.zst train.py
                                        without loss, from the first request on

If SIGINT was ignored at the start (a script's `&`), SIGTERM (`kill`) ends the recording, and the \
trace is complete. The trace begins with the blocks that are live at the start. Events reach the \
file system within 0.2 s, in pieces that stay readable even if the recorder dies. `ring_events:` \
of the process makes its rings longer.

Exit codes: 0 success; 1 no such process or record, or it can't be read, or the file can't be \
written; 2 wrong usage; 3 written, but events were lost (the trace marks where).")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The trace to write.
    #[arg(short, long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(file))]
    output: PathBuf,
    /// End after this long, as in 30s or 5min.
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    period: Option<Duration>,
    /// Print the summary as JSON.
    #[arg(long)]
    json: bool,
}

fn file(path: PathBuf) -> Result<PathBuf, &'static str> {
    match output::is_stdout(&path) {
        true => Err("a trace is written in pieces, to a file: name one, as in run.trace.zst"),
        false => Ok(path),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let parsed: Result<jiff::SignedDuration, _> = text.parse();
    let parsed = parsed.ok().and_then(|duration| Duration::try_from(duration).ok());
    parsed.ok_or_else(|| "expected a time, as in 30s, 5min or 1h 30min".to_owned())
}

/// Time between two reads of the rings, and between two pieces of the file.
const LOOK: Duration = Duration::from_millis(5);
const WRITE: Duration = Duration::from_millis(200);

pub fn run(arguments: &Arguments) -> Ended {
    let reader = arguments.target.open()?;
    if reader.is_live() != Some(true) {
        return Err(Failure::new(format_args!(
            "{}: its process no longer runs, so there is nothing to record; `gruyere post` shows \
             its last state",
            reader.path().display()
        )));
    }
    let path = arguments.output.display();
    let failed =
        |error: io::Error| Failure::new(format_args!("{path}: {error}; name another file with -o"));
    let mut file = TraceFile::create(&arguments.output).map_err(failed)?;
    // Writes everything read before it ends.
    let stop = signals::finish_first();
    // None: too long ever to end.
    let end = arguments.period.and_then(|period| Instant::now().checked_add(period));
    let mut recorder = Recorder::start(&reader);
    let mut written = Instant::now();
    loop {
        let sound = reader.expect_sound();
        let over = stop.is_asked()
            || sound.is_err()
            || end.is_some_and(|end| Instant::now() >= end)
            || reader.is_live() != Some(true)
            || reader.health().closed;
        recorder.look(&reader, over);
        if over || written.elapsed() >= WRITE || recorder.follower.lines.waiting() > 1 << 20 {
            file.write(&recorder.follower.lines.take()).map_err(failed)?;
            written = Instant::now();
        }
        // Events read before are already written.
        sound?;
        if over {
            break;
        }
        std::thread::sleep(LOOK);
    }
    let counts = recorder.follower.counts;
    let (bytes, text) = file.lengths();
    let text = match arguments.json {
        true => {
            let summary = json!({
                "events": counts.events, "lost_events": counts.lost, "mended_blocks": counts.mended,
                "unknown_frees": counts.unknown_frees, "blocks_at_start": counts.at_start,
                "file_bytes": bytes, "text_bytes": text,
            });
            format!("{summary:#}\n")
        }
        false => format!(
            "{path}: {} events and {} earlier blocks, {bytes} bytes; {} events lost, {} blocks \
             mended, {} frees of unknown blocks left out\n",
            counts.events, counts.at_start, counts.lost, counts.mended, counts.unknown_frees
        ),
    };
    output::print(text)?;
    Ok(if counts.lost > 0 { Exit::Torn } else { Exit::Fine })
}

/// The rings' follower with its position in them.
struct Recorder {
    cursor: Cursor,
    follower: Follower,
}

impl Recorder {
    fn start(reader: &Reader<'_>) -> Recorder {
        let ticks = |duration: Duration| {
            let nanoseconds = duration.as_nanos() as f64;
            reader
                .scale()
                .map_or(1 << 28, |scale| (nanoseconds / scale.nanoseconds_per_tick) as u64)
        };
        let mut cursor = Cursor::default();
        // Earlier events do not belong to this trace.
        let _ = reader.events(&mut cursor);
        let blocks = live(reader);
        let since = reader.events(&mut cursor);
        let mut follower = Follower::new(ticks(Duration::from_millis(1)));
        follower.begin(&blocks, &since.entries);
        follower.add(since.entries);
        if since.lost > 0 {
            follower.lost(since.lost);
        }
        Recorder { cursor, follower }
    }

    /// Adds events to the last read that had begun and were not yet written, or counts them as
    /// lost.
    fn await_late(&mut self, reader: &Reader<'_>, found: &mut Events) {
        let begun = Instant::now();
        while self.cursor.late() > 0 && begun.elapsed() < LATE {
            std::thread::sleep(LOOK);
            let more = reader.events(&mut self.cursor);
            found.entries.extend(more.entries);
            found.lost = found.lost.saturating_add(more.lost);
        }
        found.lost = found.lost.saturating_add(self.cursor.give_up());
    }

    /// Takes in the events since the last read; all of them if this is the `last`.
    fn look(&mut self, reader: &Reader<'_>, last: bool) {
        // Before reading the rings: younger events may still miss older events of other shards.
        let now = clock::now();
        let mut found = reader.events(&mut self.cursor);
        if last {
            self.await_late(reader, &mut found);
        }
        self.follower.add(found.entries);
        if found.lost == 0 {
            self.follower.apply(if last { u64::MAX } else { now });
            // After a loss, the match of frees to blocks is a guess: the block map decides.
            if last && self.follower.counts.lost > 0 {
                self.follower.mend(&live(reader), &[]);
            }
            return;
        }
        self.follower.lost(found.lost);
        self.follower.apply(u64::MAX);
        let blocks = live(reader);
        let since = reader.events(&mut self.cursor);
        self.follower.mend(&blocks, &since.entries);
        self.follower.add(since.entries);
        if since.lost > 0 {
            self.follower.lost(since.lost);
        }
        if last {
            self.follower.apply(u64::MAX);
        }
    }
}

/// The longest wait of the last read for events that have begun: their threads may be waiting for a
/// processor.
const LATE: Duration = Duration::from_millis(100);

fn live(reader: &Reader<'_>) -> Vec<gruyere_record::BlockEntry> {
    let blocks =
        reader.blocks().entries.into_iter().filter(|(_, state)| *state == BlockState::Live);
    blocks.map(|(block, _)| block).collect()
}

/// Whether an event adds or removes a block.
fn is_of_block(kind: EventKind) -> bool {
    matches!(kind, EventKind::Malloc | EventKind::Free)
}

#[cfg(test)]
mod tests {
    use gruyere_record::{DeviceFacts, Record, RecordOptions};

    use super::*;

    #[test]
    fn a_call_that_waited_is_written_after_what_it_waited_for() {
        use EventKind::{Free, Malloc};
        let folder = tempfile::tempdir().unwrap();
        let options = RecordOptions {
            directory: folder.path().to_owned(),
            ring_events: 256,
            ..RecordOptions::default()
        };
        let facts =
            DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 80 << 30 };
        let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
        let (mut shard, mut other) = (record.shard(0, 0), record.shard(0, 1));
        let reader = Reader::own(record).unwrap();
        let mut recorder = Recorder::start(&reader);
        recorder.follower.lines.take();
        let first = clock::now();
        // On the same shard, within a read: the second malloc began before the free, and got the
        // block after it.
        shard.event(Malloc, 0, 0, 1 << 20, 600, first);
        shard.event(Free, 0, 0, 1 << 20, 1024, first + 20);
        shard.event(Malloc, 0, 0, 1 << 20, 7, first + 10);
        while clock::now() <= first + 20 {}
        recorder.look(&reader, false);
        assert_eq!(recorder.follower.lines.take(), "a 1 600 0 0\nf 1\na 2 7 0 0\n");
        // On two shards, from read to read: this one began before everything.
        shard.event(Free, 0, 0, 1 << 20, 512, clock::now());
        recorder.look(&reader, false);
        other.event(Malloc, 0, 0, 1 << 20, 2000, first);
        recorder.look(&reader, true);
        assert_eq!(recorder.follower.lines.take(), "f 2\na 3 2000 0 0\n");
        let counts = recorder.follower.counts;
        assert_eq!((counts.events, counts.lost, counts.unknown_frees), (5, 0, 0));
        record.close();
    }
}
