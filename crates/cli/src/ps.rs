//! `gruyere ps`: the processes with a record.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::sweep::{self, Found, Listing, State};
use gruyere_record::{DeviceGauge, ReadError, Reader, counted, cut, plain};
use serde_json::{Value, json};

use crate::amounts::bytes;
use crate::candidates::{self, By, Candidate};
use crate::command;
use crate::failure::{Ended, Exit, Failure, say};
use crate::output;
use crate::recent;
use crate::shares;
use crate::target::{Folder, Whose};
use crate::wrap;

/// Lists the processes that use gruyere, one line for each device they use, then the dead processes
/// that left a record, one line each, the newest first.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere ps                 processes on this machine and what they hold
  gruyere ps --json | jq '.processes[] | select(.rank == 0)'
  gruyere ps --json | jq -r '.dead[0].conclusion'
  gruyere ps --sweep         remove the records that dead processes left

--all-users also lists processes of other users. A process that could make no file for its record \
(/dev/shm is full, or can't be written), or whose file was removed, is found by its descriptors in \
/proc. A record is left \
out, and named, if its file does not belong to the user whose process it names, or if it can't be \
read in full.

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

impl Device {
    /// Whether the process holds or held memory here. Each rank of a job sees the GPUs of all ranks
    /// of its host.
    fn is_used(&self) -> bool {
        let gauge = |gauge| self.now.gauge(gauge);
        gauge(DeviceGauge::Reserved) > 0
            || gauge(DeviceGauge::ReservedPeak) > 0
            || self.now.live_peak > 0
    }
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
    let unread = found.iter().filter(|found| found.unread().is_some()).count();
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
    let unreadable = dead.iter().filter(|one| one.process.is_none()).count();
    if unreadable > 0 {
        say(
            "ps",
            format_args!(
                "{} of dead processes can't be read, as the list says of each; `gruyere ps \
                 --sweep` removes the records of all dead processes",
                counted(unreadable as u64, "record")
            ),
        );
        trouble = true;
    }
    output::print(match arguments.json {
        true => json(&rows, &dead, swept.removed, [unread, foreign]),
        false => table(&rows, &dead, arguments.sweep.then_some(swept.removed), [unread, foreign]),
    })?;
    Ok(if trouble { Exit::Failed } else { Exit::Fine })
}

/// Error for an unreadable record: of another version, a line, cut to fit a terminal; else the file
/// and the reason.
fn failure(path: &Path, error: &ReadError) -> Failure {
    let (ReadError::Version { .. }, Some(pid)) = (error, sweep::pid(path)) else {
        return Failure::new(error.in_folder());
    };
    let said = format!("process {pid}: {}", candidates::unreadable(error));
    let stderr = io::stderr();
    Failure::new(match stderr.is_terminal() {
        true => cut(&said, candidates::columns(&stderr).saturating_sub("gruyere ps: ".len())),
        false => said,
    })
}

fn json(rows: &[Row], dead: &[Candidate], swept: usize, [unread, foreign]: [usize; 2]) -> String {
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
            "pid": one.pid,
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
        "unread": unread, "of_other_users": foreign
    });
    format!("{all:#}\n")
}

/// Widths of the number columns; with the rest for the command, 80 columns.
const WIDTHS: [usize; 8] = [7, 4, 3, 10, 10, 10, 10, 6];

/// The fewest columns that are worth having for a command beside the numbers.
const LEAST_COMMAND: usize = 8;
/// The width for commands if there is neither a terminal nor $COLUMNS.
const PLENTY: usize = 80;
/// Before the rest of a row that takes several lines.
const INDENT: &str = "    ";

/// The places of a row's parts.
#[derive(Clone, Copy)]
struct Layout {
    /// Columns of a line; `None`: lines are not broken.
    narrow: Option<usize>,
    /// Columns for the command.
    room: usize,
}

impl Layout {
    /// `columns`: of the terminal, or of $COLUMNS.
    fn new(columns: Option<usize>) -> Layout {
        // Plus 1, for a number such as 1023.99 MiB, which moves the row.
        let used = WIDTHS.iter().sum::<usize>() + WIDTHS.len() - 1 + 2 + 1;
        let room = columns.map_or(PLENTY, |columns| columns.saturating_sub(used));
        match columns.filter(|_| room < LEAST_COMMAND) {
            Some(columns) => {
                let room = columns.saturating_sub(INDENT.len()).max(1);
                Layout { narrow: Some(columns), room }
            }
            None => Layout { narrow: None, room },
        }
    }

    /// A row; on a narrow terminal, on several lines, the last of which is the command's.
    fn row(self, cells: [String; WIDTHS.len()], command: &str) -> String {
        let most = self.narrow.unwrap_or(usize::MAX);
        let (mut out, mut used) = (String::new(), 0);
        for (cell, width) in cells.into_iter().zip(WIDTHS) {
            let cell = format!("{cell:>width$}");
            let wide = cell.chars().count();
            if used > 0 && used + 1 + wide > most {
                out.push('\n');
                out.push_str(INDENT);
                used = INDENT.len();
            } else if used > 0 {
                out.push(' ');
                used += 1;
            }
            out.push_str(&cell);
            used += wide;
        }
        let before = if self.narrow.is_some() { format!("\n{INDENT}") } else { "  ".to_owned() };
        out + &before + command + "\n"
    }

    /// A sentence, with the end of its line.
    fn sentence(self, text: &str) -> String {
        match self.narrow {
            Some(columns) => wrap::wrap(text, columns, "  ").join("\n") + "\n",
            None => format!("{text}\n"),
        }
    }
}

/// Prefix of the command of another user's process.
fn note(whose: &Whose) -> String {
    let note = whose.note();
    if note.is_empty() { note } else { format!("{}: ", note.trim()) }
}

/// `unread`: records of processes that live, or may, and can't be read; `foreign`: of other users.
fn table(
    rows: &[Row],
    dead: &[Candidate],
    swept: Option<usize>,
    [unread, foreign]: [usize; 2],
) -> String {
    let stdout = io::stdout();
    let columns = candidates::columns(stdout);
    let layout = Layout::new(wrap::width());
    let Layout { room, .. } = layout;
    let mut out = String::new();
    if rows.is_empty() && unread > 0 {
        out += &layout.sentence(&format!(
            "no live process is listed: {} can't be read",
            counted(unread as u64, "record")
        ));
    } else if rows.is_empty() {
        out += "no live process uses gruyere here\n";
    } else {
        let head = ["PID", "RANK", "GPU", "LIVE", "PEAK", "HELD", "IDLE", "LOST"];
        out += &layout.row(head.map(str::to_owned), "COMMAND");
    }
    let notes: Vec<String> = rows.iter().map(|row| note(&row.whose)).collect();
    let commands: Vec<&str> = rows.iter().map(|row| &*row.process.command).collect();
    let least = notes.iter().map(|note| room.saturating_sub(note.chars().count())).min();
    let commands = command::told_apart(&commands, least.unwrap_or(room));
    let several = ambiguous(rows.iter().map(|row| &row.process));
    for ((row, note), command) in rows.iter().zip(notes).zip(commands) {
        let rank = row.process.rank.map_or("-".to_owned(), |rank| rank.to_string());
        let Process { pid, pid_namespace, .. } = row.process;
        let pid = match several.contains(&pid) {
            true => format!("{pid}@{pid_namespace}"),
            false => pid.to_string(),
        };
        let command = cut(&format!("{note}{command}"), room);
        let mut used = row.devices.iter().filter(|device| device.is_used()).peekable();
        if used.peek().is_none() {
            let mut cells = std::array::from_fn(|_| "-".to_owned());
            (cells[0], cells[1]) = (pid.clone(), rank.clone());
            out += &layout.row(cells, &command);
        }
        for Device { now: device, peak } in used {
            let held = device.held();
            let cells = [
                pid.clone(),
                rank.clone(),
                device.device.to_string(),
                bytes(device.live),
                bytes(*peak),
                bytes(device.gauge(DeviceGauge::Reserved)),
                bytes(held.idle()),
                format!("{:.1}%", held.fragmentation() * 100.0),
            ];
            out += &layout.row(cells, &command);
        }
    }
    match swept {
        Some(swept) => {
            out += &format!("removed {} of ended processes\n", counted(swept as u64, "record"));
        }
        None if dead.is_empty() => {}
        None => {
            out.push('\n');
            out += &layout.sentence(
                "Died: `gruyere post PID` shows one, `gruyere ps --sweep` removes their records",
            );
            out += &candidates::table(dead, By::Pid, columns);
        }
    }
    let unseen =
        rows.iter().filter(|row| !row.whose.note().is_empty() && !row.whose.is_seen).count();
    if unseen > 0 {
        out += &layout.sentence(&format!(
            "{unseen} of other users can't be seen from here (in another container, or hidden): \
             only the file's owner vouches for them"
        ));
    }
    if foreign > 0 {
        out += &layout.sentence(&format!(
            "{} of other users: as root, `gruyere ps --all-users` reads them too",
            counted(foreign as u64, "record")
        ));
    }
    for pid in several {
        out += &layout.sentence(&format!(
            "several processes have the pid {pid}, each in a container of its own; name one with \
             its namespace (PID@NAMESPACE), or its file:"
        ));
        for row in rows.iter().filter(|row| row.process.pid == pid) {
            let (path, host) = (row.path.display(), plain(&row.process.host));
            out += &format!("{INDENT}{path} (host {host})\n");
        }
    }
    out
}

/// The pids that processes of several namespaces have: a container's program is often process 1.
fn ambiguous<'a>(processes: impl Iterator<Item = &'a Process>) -> Vec<u64> {
    let mut namespaces: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for process in processes {
        namespaces.entry(process.pid).or_default().insert(process.pid_namespace);
    }
    namespaces.retain(|_, namespaces| namespaces.len() > 1);
    namespaces.into_keys().collect()
}

#[cfg(test)]
mod tests {
    use gruyere_record::DEVICE_GAUGES;

    use super::*;

    #[test]
    fn a_row_fits_eighty_columns_and_a_cut_command_ends_in_an_ellipsis() {
        let cells = ["4194303", "1023", "15", "1023.99 MiB", "999.99 GiB", "1.00 TiB", "0 B"];
        let cells = std::array::from_fn(|at| cells.get(at).copied().unwrap_or("100.0%").to_owned());
        let layout = Layout::new(Some(80));
        let row = layout.row(cells, &cut("train.py --model llama-7b", layout.room));
        let row = row.trim_end();
        assert!(row.chars().count() <= 80 && row.ends_with("train.py …"), "{row}");
        assert_eq!(cut("train.py", 8), "train.py");
    }

    #[test]
    fn a_rank_is_a_row_for_the_gpu_it_uses_of_the_eight_it_sees() {
        let device = |device, held| {
            let mut now = DeviceSnapshot {
                device,
                gauges: vec![0; DEVICE_GAUGES],
                ..DeviceSnapshot::default()
            };
            now.gauges[DeviceGauge::ReservedPeak as usize] = held;
            Device { now, peak: 0 }
        };
        let row = |pid, devices| Row {
            process: Process { pid, command: "train.py".to_owned(), ..Process::default() },
            devices,
            path: PathBuf::new(),
            state: State::Live,
            whose: Whose { user: None, is_seen: true },
        };
        let rank = row(7, (0..8).map(|gpu| device(gpu, u64::from(gpu == 3))).collect());
        let idle = row(8, vec![device(0, 0), device(1, 0)]);
        let told = table(&[rank, idle], &[], None, [0, 0]);
        let cells: Vec<Vec<&str>> =
            told.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
        assert_eq!(cells[1..], [["7", "-", "3"], ["8", "-", "-"]], "{told}");
    }

    #[test]
    fn one_pid_of_two_containers_is_ambiguous_and_two_records_of_a_process_are_not() {
        let process = |pid, pid_namespace| Process { pid, pid_namespace, ..Process::default() };
        let all = [process(1, 7), process(1, 8), process(2, 7), process(3, 7), process(3, 7)];
        assert_eq!(ambiguous(all.iter()), [1]);
        assert!(ambiguous(all[1..].iter()).is_empty());
    }

    #[test]
    fn on_a_narrow_terminal_a_row_goes_on_below_and_the_command_is_the_last_line() {
        let cells = ["4242", "-", "0", "1.50 GiB", "2.00 GiB", "2.50 GiB", "512.00 MiB", "1.2%"];
        for columns in [40, 50, 60, 77] {
            let layout = Layout::new(Some(columns));
            let row = layout.row(cells.map(str::to_owned), &cut("train.py --model x", layout.room));
            assert!(row.lines().all(|line| line.chars().count() <= columns), "{row}");
            assert_eq!(row.lines().last(), Some("    train.py --model x"));
            let told: Vec<&str> = row.split_whitespace().collect();
            let cells: Vec<&str> = cells.iter().flat_map(|cell| cell.split(' ')).collect();
            assert_eq!(told[..cells.len()], cells[..], "{row}");
        }
        assert_eq!(Layout::new(Some(80)).row(cells.map(str::to_owned), "x").lines().count(), 1);
        assert_eq!(Layout::new(None).row(cells.map(str::to_owned), "x").lines().count(), 1);
    }
}
