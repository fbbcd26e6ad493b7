//! `gruyere ps`: the processes with a record.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep::{self, Found, Listing, State};
use gruyere_record::{DeviceGauge, ReadError, Reader, cut};
use serde_json::{Value, json};

use crate::amounts::bytes;
use crate::candidates::{self, By, Candidate};
use crate::command;
use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::recent;
use crate::shares;
use crate::target::{Folder, Whose};

/// Lists the processes that use gruyere, one line for each device they use, then the dead processes
/// that left a record, one line each, the newest first.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere ps                 processes on this machine and what they hold
  gruyere ps --json | jq '.processes[] | select(.rank == 0)'
  gruyere ps --json | jq -r '.dead[0].conclusion'
  gruyere ps --sweep         remove the records that dead processes left

--all-users also lists processes of other users. A process whose record is not in /dev/shm (it was \
full) is never listed: `gruyere stat PID` finds it. A record is left out, and named, if its file \
does not belong to the user whose process it names, or if it can't be read in full.

Exit codes: 0 success (also if there is no process); 1 a record or the folder could not be read; 2 \
wrong usage.")]
pub struct Arguments {
    /// Print JSON: processes, dead processes and their files, the number of swept records.
    #[arg(long)]
    json: bool,
    /// Remove the records of processes that ended without a clean exit. Live ones are never
    /// touched.
    #[arg(long)]
    sweep: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Current state of a process and its devices.
struct Row {
    process: Process,
    devices: Vec<Device>,
    path: PathBuf,
    state: State,
    whose: Whose,
}

/// A device's numbers, and the highest live memory of its last step or minute.
struct Device {
    now: DeviceSnapshot,
    peak: u64,
}

fn device(reader: &Reader, mut now: DeviceSnapshot, is_live: bool) -> Device {
    // The gauge of lost memory may be out of date.
    now.read_lost(reader);
    let peak = recent::peak(&reader.timeline(now.device).entries, &now, is_live);
    Device { now, peak }
}

fn row(reader: &Reader, state: State, claim: &Claim) -> Result<Row, ReadError> {
    let row = Row {
        process: reader.process(),
        devices: reader
            .device_snapshots()
            .into_iter()
            .map(|now| device(reader, now, state == State::Live))
            .collect(),
        path: reader.path().to_owned(),
        state,
        whose: Whose::of(reader, claim),
    };
    reader.expect_sound()?;
    Ok(row)
}

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
            claim => reader
                .and_then(|reader| row(&reader, state, &claim))
                .map_err(|error| failure(&path, &error)),
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
    output::print(match arguments.json {
        true => json(&rows, &dead, swept.removed, foreign),
        false => table(&rows, &dead, arguments.sweep.then_some(swept.removed), foreign),
    })?;
    Ok(if trouble { Exit::Failed } else { Exit::Fine })
}

/// Error for an unreadable record: of another version, a line, cut to fit a terminal; else the file
/// and the reason.
fn failure(path: &Path, error: &ReadError) -> Failure {
    let (ReadError::Version { .. }, Some(pid)) = (error, sweep::pid(path)) else {
        return Failure::new(error);
    };
    let said = format!("process {pid}: {}", candidates::unreadable(error));
    let stderr = io::stderr();
    Failure::new(match stderr.is_terminal() {
        true => cut(&said, candidates::columns(&stderr).saturating_sub("gruyere ps: ".len())),
        false => said,
    })
}

fn json(rows: &[Row], dead: &[Candidate], swept: usize, foreign: usize) -> String {
    let device = |Device { now: device, peak }: &Device| {
        let value = json!({
            "device": device.device,
            "name": device.facts.name,
            "live_bytes": device.live,
            "live_peak_bytes": device.live_peak,
            "peak_bytes": peak,
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
    format!("{all:#}\n")
}

/// Widths of the number columns; with the rest for the command, 80 columns.
const WIDTHS: [usize; 8] = [7, 4, 3, 10, 10, 10, 10, 6];

/// The number columns of a row.
fn numbers(cells: [String; WIDTHS.len()]) -> String {
    let cell = |(cell, width): (String, usize)| format!("{cell:>width$}");
    let cells: Vec<String> = cells.into_iter().zip(WIDTHS).map(cell).collect();
    cells.join(" ")
}

/// Columns for the command: the rest of the terminal, or plenty without a terminal.
fn room_for_commands() -> usize {
    // Plus 1, for a number such as 1023.99 MiB, which moves the row.
    let used = WIDTHS.iter().sum::<usize>() + WIDTHS.len() - 1 + 2 + 1;
    let size = io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    size.map_or(80, |(width, _)| usize::from(width.0).saturating_sub(used).max(1))
}

/// Prefix of the command of another user's process.
fn note(whose: &Whose) -> String {
    let note = whose.note();
    if note.is_empty() { note } else { format!("{}: ", note.trim()) }
}

fn table(rows: &[Row], dead: &[Candidate], swept: Option<usize>, foreign: usize) -> String {
    // Writing to a String cannot fail, here and below.
    let mut out = String::new();
    let room = room_for_commands();
    if rows.is_empty() {
        let _ = writeln!(out, "no live process uses gruyere here");
    } else {
        let head = ["PID", "RANK", "GPU", "LIVE", "PEAK", "HELD", "IDLE", "LOST"];
        let _ = writeln!(out, "{}  COMMAND", numbers(head.map(str::to_owned)));
    }
    let notes: Vec<String> = rows.iter().map(|row| note(&row.whose)).collect();
    let commands: Vec<&str> = rows.iter().map(|row| &*row.process.command).collect();
    let least = notes.iter().map(|note| room.saturating_sub(note.chars().count())).min();
    let commands = command::told_apart(&commands, least.unwrap_or(room));
    for ((row, note), command) in rows.iter().zip(notes).zip(commands) {
        let rank = row.process.rank.map_or("-".to_owned(), |rank| rank.to_string());
        let pid = row.process.pid;
        let command = cut(&format!("{note}{command}"), room);
        for Device { now: device, peak } in &row.devices {
            let held = device.held();
            let cells = [
                pid.to_string(),
                rank.clone(),
                device.device.to_string(),
                bytes(device.live),
                bytes(*peak),
                bytes(device.gauge(DeviceGauge::Reserved)),
                bytes(held.idle()),
                format!("{:.1}%", held.fragmentation() * 100.0),
            ];
            let _ = writeln!(out, "{}  {command}", numbers(cells));
        }
        if row.devices.is_empty() {
            let mut cells = std::array::from_fn(|_| "-".to_owned());
            (cells[0], cells[1]) = (pid.to_string(), rank);
            let _ = writeln!(out, "{}  {command}", numbers(cells));
        }
    }
    match swept {
        Some(swept) => {
            let _ = writeln!(out, "removed {swept} records of ended processes");
        }
        None if dead.is_empty() => {}
        None => {
            let columns = candidates::columns(io::stdout());
            let _ = writeln!(
                out,
                "\nDied: `gruyere post PID` shows one, `gruyere ps --sweep` removes their \
                 records\n{}",
                candidates::table(dead, By::Pid, columns).trim_end()
            );
        }
    }
    let unseen =
        rows.iter().filter(|row| !row.whose.note().is_empty() && !row.whose.is_seen).count();
    if unseen > 0 {
        let _ = writeln!(
            out,
            "{unseen} of other users can't be seen from here (in another container, or hidden): \
             only the file's owner vouches for them"
        );
    }
    if foreign > 0 {
        let _ = writeln!(
            out,
            "{foreign} records of other users: `gruyere ps --all-users` reads them too"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_fits_eighty_columns_and_a_cut_command_ends_in_an_ellipsis() {
        let cells = ["4194303", "1023", "15", "1023.99 MiB", "999.99 GiB", "1.00 TiB", "0 B"];
        let mut row = numbers(std::array::from_fn(|at| {
            cells.get(at).copied().unwrap_or("100.0%").to_owned()
        }));
        row.push_str("  ");
        row.push_str(&cut("train.py --model llama-7b", 10));
        assert!(row.chars().count() <= 80 && row.ends_with("train.py …"), "{row}");
        assert_eq!(cut("train.py", 8), "train.py");
    }
}
