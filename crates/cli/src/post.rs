//! `gruyere post`: the last state of a dead process: the named process, or the latest to die.

mod end;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use gruyere::heap::Bytes;
use gruyere_record::conclusion::{Conclusion, Rank};
use gruyere_record::device_gauge::RUNGS;
use gruyere_record::dump::from_record;
use gruyere_record::dump::state::MOST_EVENTS;
use gruyere_record::dump::state::State;
use gruyere_record::file;
use gruyere_record::page;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep;
use gruyere_record::{Reader, brief, counted, plain, quoted, record_dir, text};
use serde::Serialize;
use serde_json::json;

use self::end::{End, Ending};
use crate::candidates::{self, By, Candidate, ran_out};
use crate::ending::{dump_folder, left_beside};
use crate::failure::{Ended, Exit, Failure};
use crate::output;
use crate::target::{Folder, LastDead, Target};
use crate::wrap::{self, unfold};

/// Shows the last state of a process that died: the conclusion, how it ended, live memory, the last
/// events. Default: your process that died last; of a job's ranks, the one that ran out of memory.
#[derive(clap::Args)]
#[command(mut_arg("target", |target| target.help(WITHOUT_A_NAME)))]
#[command(after_help = "\
Examples:
  gruyere post                          the process that died last
  gruyere post 4242                     another one, by its pid
  gruyere post /dev/shm/gruyere-4026531836-4242-99-0.record
  gruyere post 4242 --full              every table, the map, the last events
  gruyere post 4242 --html              a page to share: by line, over time
  gruyere post 4242 --json | jq -r '.conclusion.lines[]'

A killed process leaves its record in /dev/shm until `gruyere ps --sweep` or a restart of the \
machine. A program under the Python package that ends with an uncaught torch.OutOfMemoryError \
leaves a copy of its record there. A process that ends by itself in any other way leaves no record.

Exit codes: 0 success; 1 no such process or record, or it can't be read; 2 wrong usage; 3 read, \
but some values are marked torn: they are not from one moment, since the process writes or was \
killed while it wrote, or the record had no room for some live blocks.")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Show everything: live blocks by lifetime, size, age and stream, the map, each step, the last
    /// events.
    #[arg(long)]
    full: bool,
    /// How many of the last events to show.
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    events: usize,
    /// Print JSON: `state` is as in docs/schema/oom-dump.json.
    #[arg(long)]
    json: bool,
    /// Write a self-contained page for sharing to FILE (default: gruyere-post-PID.html): live
    /// memory over time, by line with its source, the map; `-`: to standard output. Since it
    /// contains source and the whole command line, only you can read the file (mode 0600) until you
    /// share it.
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["json", "full"])]
    html: Option<Option<PathBuf>>,
}

/// Help text: the default process.
const WITHOUT_A_NAME: &str = "The process (its pid; in a container, the pid there) or its record \
                              file. Default: your process that died last or, if none left a \
                              record, the one that runs";

pub fn run(arguments: &Arguments) -> Ended {
    let last = arguments.target.open_or_last_dead()?;
    let reader = &last.reader;
    let devices = reader.device_snapshots();
    // As many as the process itself would have: it tells growth by them, and its page draws them.
    let mut state = from_record::state(reader, arguments.events.max(MOST_EVENTS));
    reader.expect_sound()?;
    let ran_out = ran_out(&state.events.entries);
    let conclusion = Conclusion::of(&state, &ranks(reader, &arguments.target));
    if arguments.html.is_none() {
        let more = state.events.entries.len().saturating_sub(arguments.events);
        state.events.entries.drain(..more);
        state.events.earlier += more as u64;
    }
    let ended = Ending::of(reader, &devices, &state, ran_out);
    let name = name(reader, &arguments.target);
    let typed = if arguments.json { name.whole() } else { name.typed() };
    let copy = left_copy(reader, &arguments.target.folder);
    let next = next(&ended, &state, typed, copy.as_deref());
    if let Some(file) = &arguments.html {
        state.conclusion = Some(conclusion);
        let path = file.clone();
        let pid = state.process.pid;
        let path = path.unwrap_or_else(|| PathBuf::from(format!("gruyere-post-{pid}.html")));
        write_page(&state, (&ended.in_words(), ended.ran_out), &path)?;
        if !output::is_stdout(&path) {
            output::print(format!("{}\n", plain(&path.display().to_string())))?;
        }
        return Ok(exit(&ended));
    }
    let text = match arguments.json {
        true => {
            let ladder: Vec<_> = devices.iter().map(ladder).collect();
            let timelines: Vec<_> =
                devices.iter().map(|device| timeline(reader, device.device)).collect();
            format!(
                "{:#}\n",
                json!({
                    "conclusion": conclusion, "ended": ended, "ladder": ladder,
                    "died_last": last.last_seen.is_some(),
                    "timelines": timelines, "next": next,
                    "state": state
                })
            )
        }
        false => {
            state.conclusion = Some(conclusion);
            let page = page(&ended, reader, &devices, (&state, &name, &next), arguments.full);
            format!("{}{page}{}", chosen(&last), others(&last, &arguments.target.folder))
        }
    };
    output::print(text)?;
    Ok(exit(&ended))
}

fn exit(ended: &Ending) -> Exit {
    let torn = ended.torn_lanes + ended.torn_gauges > 0 || ended.torn_entries > 0;
    if torn || ended.unrecorded_blocks > 0 { Exit::Torn } else { Exit::Fine }
}

fn write_page(state: &State, (said, ran_out): (&str, bool), path: &Path) -> Result<(), Failure> {
    // `--html 4242` means the process.
    let name = path.to_string_lossy();
    if name.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(Failure::new(format_args!(
            "--html takes a file, but {name} looks like a process: write gruyere post {name} \
             --html, or --html ./{name}"
        )));
    }
    if state.devices.is_empty() {
        return Err(Failure::new("its process has no device, so there is no page to draw"));
    }
    let about = page::About { said: said.to_owned(), ran_out, ..page::About::default() };
    if output::is_stdout(path) {
        return output::write(|out| page::write(out, state, &about)).map(drop);
    }
    file::replace(path, page::MOST_BYTES, file::PRIVATE, |out| page::write(out, state, &about))
        .map_err(|error: io::Error| {
            Failure::new(format_args!(
                "{}: {error}; name a file in a writable folder with free space",
                path.display()
            ))
        })
}

/// Names the process, if the user named none.
fn chosen(last: &LastDead) -> String {
    let Some(time) = last.last_seen else { return String::new() };
    let (path, process) = (last.reader.path(), last.reader.process());
    let who = candidates::in_words(path, &process);
    let age = candidates::age(time);
    let who = match last.ran_out {
        true => format!(
            "Of the job that died last, the rank that ran out of memory, seen alive {age} ago: \
             {who}"
        ),
        false => format!("The process that died last, seen alive {age} ago: {who}"),
    };
    let mut out = String::new();
    tell(&mut out, &who, "  ");
    out + "\n"
}

/// The most processes in the list of others that died, latest first.
const OTHERS: usize = 5;

fn others(last: &LastDead, folder: &Folder) -> String {
    let read = |dead| Candidate::dead(dead, folder.owners());
    let found: Vec<Candidate> = last.others.iter().filter_map(read).take(OTHERS).collect();
    if found.is_empty() {
        return String::new();
    }
    let mut out = "\nOthers that died (`gruyere post PID`)\n".to_owned();
    out += &candidates::table(&found, By::Pid, candidates::columns(std::io::stdout()));
    if last.others.len() > OTHERS {
        let _ = writeln!(out, "{} more: `gruyere ps`", last.others.len() - OTHERS);
    }
    out
}

#[derive(Serialize)]
struct Rung {
    name: &'static str,
    calls: u64,
    bytes: u64,
    microseconds: u64,
}

fn ladder(device: &DeviceSnapshot) -> Vec<Rung> {
    RUNGS
        .iter()
        .map(|rung| Rung {
            name: rung.name,
            calls: device.gauge(rung.calls),
            bytes: device.gauge(rung.bytes),
            microseconds: device.gauge(rung.microseconds),
        })
        .collect()
}

/// The ranks of the process's job whose records exist.
fn ranks(reader: &Reader<'_>, target: &Target) -> Vec<Rank> {
    let ours = reader.process();
    if !ours.is_of_job(&ours) {
        return Vec::new();
    }
    let Ok(listing) = target.folder.list() else { return Vec::new() };
    let mut found: BTreeMap<u64, Rank> = BTreeMap::new();
    let readers = listing.found.iter().filter_map(|found| found.reader.as_ref().ok());
    for reader in readers.chain([reader]) {
        let process = reader.process();
        if let Some(rank) = process.rank.filter(|_| ours.is_of_job(&process)) {
            let devices = reader.device_snapshots();
            let peaks = devices.iter().map(|device| device.live_peak);
            found.insert(rank, Rank { rank, live_peak_bytes: peaks.max().unwrap_or(0) });
        }
    }
    found.into_values().collect()
}

/// What other commands find this record by.
enum Name {
    Pid(String),
    /// The path of its file, quoted for a shell, since the pid means another record or none.
    File(String),
}

impl Name {
    /// The path is long, and stands in several commands: they take it from a variable.
    const VARIABLE: &str = "\"$RECORD\"";

    fn typed(&self) -> &str {
        match self {
            Self::Pid(pid) => pid,
            Self::File(_) => Self::VARIABLE,
        }
    }

    fn whole(&self) -> &str {
        let (Self::Pid(name) | Self::File(name)) = self;
        name
    }
}

fn name(reader: &Reader<'_>, target: &Target) -> Name {
    let pid = reader.process().pid.to_string();
    let by_pid = Target { target: Some(pid.clone()), folder: target.folder.clone() };
    let is_usual = target.folder.directory == record_dir::record_dir();
    match is_usual && by_pid.open().is_ok_and(|found| found.path() == reader.path()) {
        true => Name::Pid(pid),
        false => Name::File(quoted(&reader.path().display().to_string())),
    }
}

/// The file of the copy that the process left at an out-of-memory, if this is its own record.
fn left_copy(reader: &Reader<'_>, folder: &Folder) -> Option<PathBuf> {
    let copy = left_beside(reader.path(), folder.owners())?;
    let is_copy = copy.process().is_same(&reader.process())
        && sweep::number(copy.path()) > sweep::number(reader.path());
    is_copy.then(|| copy.path().to_owned())
}

/// What to look at next, as far as it applies; `name`: the record's; `copy`: that of an
/// out-of-memory, which the process left.
fn next(ended: &Ending, state: &State, name: &str, copy: Option<&Path>) -> Vec<String> {
    let mut next = Vec::new();
    if let Some(copy) = copy {
        next.push(format!(
            "An out-of-memory error ended its program, and it went on. What was live then: \
             `gruyere post {}`.",
            quoted(&copy.display().to_string())
        ));
    }
    let pid = state.process.pid;
    match ended.how {
        End::Runs => {
            next.push(format!("It runs: `gruyere top` and `gruyere map {pid}` show it live."))
        }
        End::Clean => {}
        End::Killed | End::Unknown => {
            if ended.same_boot && !ended.uncaught {
                next.push(
                    "What killed it: `dmesg | grep -i -e oom -e 'killed process'` (the kernel, out \
                     of host memory), the scheduler's log (a time limit, a cgroup's limit), `dmesg \
                     | grep -i xid` (the GPU driver)."
                        .to_owned(),
                );
            }
            next.push(format!(
                "Its memory layout: `gruyere map {name}`, or `gruyere snapshot {name} -o \
                 end.pickle` for memory_viz."
            ));
        }
    }
    if ended.out_of_memories > 0 {
        match dump_folder(&state.process.configuration) {
            Some(folder) => next.push(format!(
                "It ran out of device memory: the dumps are {}/gruyere-oom-{pid}-gpu*, as text, \
                 JSON and a snapshot.",
                folder.display()
            )),
            None => next.push(
                "It ran out of device memory: with `dump_dir:FOLDER` in GRUYERE_CONF, the next run \
                 writes the causes to a file."
                    .to_owned(),
            ),
        }
    }
    if ended.how != End::Runs {
        next.push(
            "When you are done: `gruyere ps --sweep` removes the records of processes that are \
             gone."
                .to_owned(),
        );
    }
    next
}

/// The end of a device's timeline.
#[derive(Serialize)]
struct Stretch {
    time_nanoseconds: u64,
    step: u64,
    live_high_bytes: u64,
    reserved_high_bytes: u64,
    largest_low_bytes: u64,
    pending_high_bytes: u64,
}

/// The most stretches of a timeline to show, latest first.
const STRETCHES: usize = 24;

fn timeline(reader: &Reader<'_>, device: u32) -> Vec<Stretch> {
    let entries = reader.timeline(device).entries;
    let latest = &entries[entries.len().saturating_sub(STRETCHES)..];
    let stretch = |entry: &gruyere_record::timeline::TimelineEntry| Stretch {
        time_nanoseconds: entry.realtime_nanoseconds,
        step: entry.sample.step,
        live_high_bytes: entry.sample.live_high,
        reserved_high_bytes: entry.sample.reserved_high,
        largest_low_bytes: entry.sample.largest_low,
        pending_high_bytes: entry.sample.pending_high,
    };
    latest.iter().map(stretch).collect()
}

fn timeline_in_words(out: &mut String, stretches: &[Stretch], device: u32) {
    let Some(last) = stretches.last() else { return };
    let head = ["LIVE", "HELD", "LARGEST", "WAITING"];
    let [live, held, largest, pending] = head;
    let _ = writeln!(out, "\nEnd of device {device}'s timeline, in s before its last entry\n");
    let _ =
        writeln!(out, "{:>12} {:>8} {live:>12} {held:>12} {largest:>12} {pending:>12}", "", "STEP");
    for stretch in stretches {
        let before = last.time_nanoseconds.saturating_sub(stretch.time_nanoseconds) as f64 / 1e9;
        let _ = writeln!(
            out,
            "{:>12} {:>8} {:>12} {:>12} {:>12} {:>12}",
            format!("-{before:.3}"),
            stretch.step,
            Bytes(stretch.live_high_bytes).to_string(),
            Bytes(stretch.reserved_high_bytes).to_string(),
            Bytes(stretch.largest_low_bytes).to_string(),
            Bytes(stretch.pending_high_bytes).to_string()
        );
    }
}

fn page(
    ended: &Ending,
    reader: &Reader<'_>,
    devices: &[DeviceSnapshot],
    (state, name, next): (&State, &Name, &[String]),
    full: bool,
) -> String {
    let mut out = String::new();
    match (&state.conclusion, wrap::columns()) {
        (Some(conclusion), Some(_)) => {
            unfold(&conclusion.lines).iter().for_each(|said| tell(&mut out, said, "  "));
        }
        // In lines as the dump has them.
        (Some(conclusion), None) => {
            conclusion.lines.iter().for_each(|line| tell(&mut out, line, ""));
        }
        (None, _) => {}
    }
    out.push('\n');
    tell(&mut out, &ended.in_words(), "");
    out.push('\n');
    let columns = wrap::columns().unwrap_or(usize::MAX);
    let told = match full {
        // The conclusion is already printed.
        true => text::fitting(&State { conclusion: None, ..state.clone() }, columns),
        false => brief::brief(state, columns),
    };
    rows(&mut out, &told);
    for device in devices.iter().filter(|_| full) {
        timeline_in_words(&mut out, &timeline(reader, device.device), device.device);
    }
    if full {
        ladders(&mut out, devices);
    }
    if !next.is_empty() {
        let _ = writeln!(out, "\nWhat to look at next");
    }
    if let Name::File(path) = name {
        tell(&mut out, &format!("- First, for these commands: `RECORD={path}`"), "  ");
    }
    next.iter().for_each(|said| tell(&mut out, &format!("- {said}"), "  "));
    if !full {
        tell(&mut out, &format!("- Everything: `gruyere post {} --full`.", name.typed()), "  ");
        // Seldom needed, so last.
        rows(&mut out, &brief::last_events(state));
        ladders(&mut out, devices);
    }
    out
}

/// Rows of tables begin with blanks, and fit; all else is sentences.
fn rows(out: &mut String, told: &str) {
    for line in told.lines() {
        match line.starts_with(' ') {
            true => out.extend([line, "\n"]),
            false => tell(out, line, "  "),
        }
    }
}

/// What each rung of the reclaim ladder gave, on each device.
fn ladders(out: &mut String, devices: &[DeviceSnapshot]) {
    for device in devices {
        let tried: Vec<Rung> = ladder(device).into_iter().filter(|rung| rung.calls > 0).collect();
        if !tried.is_empty() {
            let _ = writeln!(out, "\nThe reclaim ladder of device {}", device.device);
        }
        for Rung { name, calls, bytes, microseconds } in tried {
            let _ = writeln!(
                out,
                "  {name:<18} {:>14} {:>12} {microseconds:>10} us",
                counted(calls, "time"),
                Bytes(bytes).to_string()
            );
        }
    }
}

/// A sentence, wrapped to the terminal, with later lines indented by `indent`; a single line if
/// there is no terminal.
fn tell(out: &mut String, sentence: &str, indent: &str) {
    let sentence = plain(sentence);
    let columns = wrap::columns().unwrap_or(usize::MAX);
    for line in wrap::wrap(&sentence, columns, indent) {
        out.push_str(&line);
        out.push('\n');
    }
}
