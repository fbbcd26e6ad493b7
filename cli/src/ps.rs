//! `gruyere ps`: the processes that have a record.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::SystemTime;

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::run::shown_command;
use gruyere_record::sweep::{self, Found, Listing, State};
use gruyere_record::{DeviceGauge, ReadError, Reader};
use indicatif::BinaryBytes;
use serde_json::{Value, json};

use crate::candidates::{self, By, Candidate};
use crate::failure::{Ended, Exit, Failure, say};
use crate::shares;
use crate::target::{Folder, Whose};

/// Lists the processes that use gruyere, a line for each device they use, and those that died and
/// left a record, a line each, the newest first.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere ps                 who holds what on this machine
  gruyere ps --json | jq '.processes[] | select(.rank == 0)'
  gruyere ps --json | jq -r '.dead[0].conclusion'
  gruyere ps --sweep         remove the records that dead processes left

Processes of other users are listed with --all-users; those whose record is not in /dev/shm (it \
was full) never are: `gruyere stat PID` finds them. A record is left out, and named, whose file is \
not of the user of the process that it says, or which can't be read whole.

Exit codes: 0 all well (also when there is no process); 1 a record could not be read, or the \
folder could not; 2 wrong usage.")]
pub struct Arguments {
    /// Print JSON: processes, the dead and their files, how many were swept.
    #[arg(long)]
    json: bool,
    /// Remove the records of processes that ended without a clean exit. Live ones are never
    /// touched.
    #[arg(long)]
    sweep: bool,
    #[command(flatten)]
    folder: Folder,
}

/// A process and its devices at this moment.
struct Row {
    process: Process,
    devices: Vec<DeviceSnapshot>,
    path: PathBuf,
    state: State,
    whose: Whose,
}

fn row(reader: &Reader, state: State, claim: &Claim) -> Result<Row, ReadError> {
    let row = Row {
        process: reader.process(),
        devices: reader.device_snapshots(),
        path: reader.path().to_owned(),
        state,
        whose: Whose::of(reader, claim),
    };
    reader.expect_sound()?;
    Ok(row)
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Ended {
    let directory = &arguments.folder.directory;
    let (Listing { found, foreign, .. }, left) = arguments.folder.living_and_dead()?;
    let owners = arguments.folder.owners();
    let (mut rows, mut trouble) = (Vec::new(), false);
    for Found { path, state, reader, claim } in found {
        let row = match claim {
            Claim::False(lie) => {
                Err(Failure::new(format_args!("{} {lie}; left out", path.display())))
            }
            claim => reader.and_then(|reader| row(&reader, state, &claim)).map_err(Failure::from),
        };
        match row {
            Ok(row) => rows.push(row),
            Err(failure) => {
                say("ps", failure);
                trouble = true;
            }
        }
    }
    rows.sort_by_key(|row| (row.process.rank, row.process.pid));
    let swept =
        if arguments.sweep { sweep::sweep(directory, owners) } else { sweep::Swept::default() };
    let dead: Vec<Candidate> = match arguments.sweep {
        true => Vec::new(),
        false => left.iter().filter_map(|dead| Candidate::dead(dead, owners)).collect(),
    };
    if swept.failed > 0 {
        say(
            "ps",
            format_args!(
                "{} stale records could not be removed from {}",
                swept.failed,
                directory.display()
            ),
        );
        trouble = true;
    }
    // A closed pipe (`| head`) is no trouble.
    let _ = if arguments.json {
        print_json(&rows, &dead, swept.removed, foreign)
    } else {
        print_table(&rows, &dead, arguments.sweep.then_some(swept.removed), foreign)
    };
    Ok(if trouble { Exit::Failed } else { Exit::Fine })
}

fn print_json(rows: &[Row], dead: &[Candidate], swept: usize, foreign: usize) -> io::Result<()> {
    let device = |device: &DeviceSnapshot| {
        let value = json!({
            "device": device.device,
            "name": device.facts.name,
            "live_bytes": device.live,
            "live_peak_bytes": device.live_peak,
            "reserved_bytes": device.gauge(DeviceGauge::Reserved),
            "reserved_peak_bytes": device.gauge(DeviceGauge::ReservedPeak),
        });
        shares::told(value, device)
    };
    let process = |row: &Row| {
        json!({
            "pid": row.process.pid,
            "pid_namespace": row.process.pid_namespace,
            "rank": row.process.rank,
            "local_rank": row.process.local_rank,
            "world_size": row.process.world_size,
            "host": row.process.host,
            "command": row.process.command,
            "record": row.path.display().to_string(),
            "live": row.state == State::Live,
            "user": row.whose.user,
            "seen": row.whose.is_seen,
            "devices": row.devices.iter().map(device).collect::<Vec<_>>(),
        })
    };
    let stale: Vec<String> = dead.iter().map(|one| one.path.display().to_string()).collect();
    let one = |one: &Candidate| {
        let process = one.process.as_ref();
        let since = one.since.duration_since(SystemTime::UNIX_EPOCH);
        json!({
            "pid": process.map(|process| process.pid),
            "rank": process.and_then(|process| process.rank),
            "command": process.map(|process| &process.command),
            "record": one.path.display().to_string(),
            "last_sign_of_life_nanoseconds": since.map_or(0, |time| time.as_nanos() as u64),
            "exit": one.exit,
            "cause": one.cause,
            "conclusion": one.says,
        })
    };
    let dead: Vec<Value> = dead.iter().map(one).collect();
    let processes: Vec<Value> = rows.iter().map(process).collect();
    let all = json!({
        "processes": processes, "dead": dead, "stale": stale, "swept": swept,
        "of_other_users": foreign
    });
    writeln!(io::stdout(), "{all:#}")
}

fn print_table(
    rows: &[Row],
    dead: &[Candidate],
    swept: Option<usize>,
    foreign: usize,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if rows.is_empty() {
        writeln!(out, "no live process uses gruyere here")?;
    } else {
        let head = ("PID", "RANK", "DEVICE", "LIVE", "RESERVED", "IDLE", "FRAG");
        writeln!(
            out,
            "{:>8} {:>5} {:>6} {:>11} {:>11} {:>11} {:>6}  COMMAND",
            head.0, head.1, head.2, head.3, head.4, head.5, head.6
        )?;
    }
    for row in rows {
        let rank = row.process.rank.map_or("-".to_owned(), |rank| rank.to_string());
        let pid = row.process.pid;
        let note = row.whose.note();
        let note = if note.is_empty() { note } else { format!("{}: ", note.trim()) };
        let command: String =
            note.chars().chain(shown_command(&row.process.command).chars()).take(80).collect();
        for device in &row.devices {
            let (live, reserved) =
                (BinaryBytes(device.live), BinaryBytes(device.gauge(DeviceGauge::Reserved)));
            let held = device.held();
            let (number, fragmentation) = (device.device, held.fragmentation() * 100.0);
            writeln!(
                out,
                "{pid:>8} {rank:>5} {number:>6} {:>11} {:>11} {:>11} {fragmentation:>5.1}%  \
                 {command}",
                live.to_string(),
                reserved.to_string(),
                BinaryBytes(held.idle()).to_string()
            )?;
        }
        if row.devices.is_empty() {
            writeln!(
                out,
                "{pid:>8} {rank:>5} {:>6} {:>11} {:>11} {:>11} {:>6}  {command}",
                "-", "-", "-", "-", "-"
            )?;
        }
    }
    match swept {
        Some(swept) => writeln!(out, "removed {swept} records of ended processes")?,
        None if dead.is_empty() => {}
        None => {
            let columns = candidates::columns(io::stdout());
            writeln!(
                out,
                "\nDied: `gruyere post PID` shows one, `gruyere ps --sweep` removes their \
                 records\n{}",
                candidates::table(dead, By::Pid, columns).trim_end()
            )?;
        }
    }
    let unseen =
        rows.iter().filter(|row| !row.whose.note().is_empty() && !row.whose.is_seen).count();
    if unseen > 0 {
        writeln!(
            out,
            "{unseen} of other users can't be seen from here (in another container, or hidden): \
             the owner of the file alone says which process it is"
        )?;
    }
    if foreign > 0 {
        writeln!(out, "{foreign} records of other users: `gruyere ps --all-users` reads them too")?;
    }
    Ok(())
}
