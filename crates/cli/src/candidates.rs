//! Lists processes to choose from, a line each, newest first: living ones with the memory they
//! hold, dead ones with their end and their conclusion.

use std::iter::repeat;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gruyere::heap::Bytes;
use gruyere_record::claim::Claim;
use gruyere_record::conclusion::{Cause, Conclusion};
use gruyere_record::dump::from_record;
use gruyere_record::dump::origins::Origins;
use gruyere_record::dump::state::{self, Event, MOST_EVENTS, last_refused};
use gruyere_record::facts::{self, Process};
use gruyere_record::open::effective_user;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::run::shown_command;
use gruyere_record::sweep::{self, Found, Look};
use gruyere_record::{DeviceGauge, Owners, ReadError, Reader, cut, plain};
use serde::Serialize;

use crate::command;
use crate::wrap::{unfold, wrap};

/// Width if the terminal's is unknown.
const COLUMNS: usize = 80;
/// Before a conclusion that is below its process.
const INDENT: &str = "    ";
/// The fewest columns in which a conclusion is readable.
const LEAST_CONCLUSION: usize = 20;
/// The part of the line for a command, and the least that is worth showing.
const COMMANDS_PART: usize = 3;
const LEAST_COMMAND: usize = 12;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// Still running.
    Runs,
    /// By an out-of-memory error that nothing caught.
    OutOfMemory,
    /// Without a clean exit, and its last request was refused: it may have caught the error.
    Refused,
    /// Without a clean exit: killed, crashed, or left by `_exit`.
    Unclean,
    /// Undecidable: the process ran before the machine was restarted, or on another one, or its
    /// record can't be read.
    Unknown,
}

impl Exit {
    /// The end of the dead process that left this record, with these last events.
    fn of(reader: &Reader<'_>, events: &[Event]) -> Exit {
        match reader.process().boot == facts::boot_id() {
            true if !ran_out(events) => Exit::Unclean,
            true if sweep::is_copy(reader.path()) => Exit::OutOfMemory,
            true => Exit::Refused,
            false => Exit::Unknown,
        }
    }

    /// As [`Exit::of`], of the process that left this record, whose blocks are not read.
    pub fn of_record(reader: &Reader<'_>) -> Exit {
        let events = state::events(reader, MOST_EVENTS, &mut Origins::of_sites(reader.sites()));
        match reader.expect_sound() {
            Ok(()) => Exit::of(reader, &events.entries),
            Err(_) => Exit::Unknown,
        }
    }

    /// Whether no request was served after a refusal.
    pub fn ran_out(self) -> bool {
        matches!(self, Exit::OutOfMemory | Exit::Refused)
    }

    fn word(self) -> &'static str {
        match self {
            Exit::Runs => "runs",
            Exit::OutOfMemory => "out of memory",
            Exit::Refused => "refused",
            Exit::Unclean => "unclean",
            Exit::Unknown => "unknown",
        }
    }
}

/// The record left by a process, unopened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dead {
    /// When it was last seen alive ([`gruyere_record::open::Opened::last_seen`]).
    pub last_seen: SystemTime,
    /// Its file.
    pub path: PathBuf,
}

/// A process to choose.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The file of its record.
    pub path: PathBuf,
    /// Its pid; for an unreadable record, as in the file's name.
    pub pid: Option<u64>,
    /// `None` if its record can't be read.
    pub process: Option<Process>,
    /// The file's owner, if another user.
    pub user: Option<u32>,
    /// Start of a living process; last sign of life of a dead one.
    pub since: SystemTime,
    /// How it ended.
    pub exit: Exit,
    /// The cause in its conclusion, if known.
    pub cause: Option<Cause>,
    /// The conclusion in a line; for a living process, the memory it holds.
    pub says: String,
    /// The remedy.
    pub remedy: Option<String>,
}

impl Candidate {
    /// A running process.
    pub fn living(reader: &Reader<'_>) -> Candidate {
        let devices = reader.device_snapshots();
        // A record may hold any number: saturate.
        let sum = |of: fn(&DeviceSnapshot) -> u64| {
            devices.iter().map(of).fold(0, |sum: u64, bytes| sum.saturating_add(bytes))
        };
        let held = sum(|device| device.gauge(DeviceGauge::Reserved));
        let live = sum(|device| device.live);
        let process = reader.process();
        Candidate {
            path: reader.path().to_owned(),
            since: process.created_at(),
            pid: Some(process.pid),
            process: Some(process),
            user: other_user(reader),
            exit: Exit::Runs,
            cause: None,
            says: format!("holds {}, live {}", Bytes(held), Bytes(live)),
            remedy: None,
        }
    }

    /// A process that left a record, which stays in memory for this call only: it is a copy.
    /// `None`: the record is gone, or another user's.
    pub fn dead(dead: &Dead, owners: Owners) -> Option<Candidate> {
        let Look::Found(found) = sweep::look(dead.path.clone(), owners, |_| true) else {
            return None;
        };
        let Found { reader, claim, .. } = *found;
        let unknown = |process: Option<Process>, says: String| Candidate {
            path: dead.path.clone(),
            pid: process.as_ref().map(|process| process.pid),
            process,
            user: None,
            since: dead.last_seen,
            exit: Exit::Unknown,
            cause: None,
            says,
            remedy: None,
        };
        let reader = match (reader, claim) {
            (Err(error), _) => {
                let pid = sweep::pid(&dead.path);
                return Some(Candidate { pid, ..unknown(None, unreadable(&error)) });
            }
            (Ok(reader), Claim::False(lie)) => {
                return Some(unknown(Some(reader.process()), lie.to_string()));
            }
            (Ok(reader), _) => reader,
        };
        let told = Candidate::of(&reader, dead.last_seen);
        Some(match reader.expect_sound() {
            Ok(()) => told,
            Err(error) => Candidate { pid: told.pid, ..unknown(None, unreadable(&error)) },
        })
    }

    /// The process that left this record.
    pub fn of(reader: &Reader<'_>, last_sign: SystemTime) -> Candidate {
        let state = from_record::state(reader, MOST_EVENTS);
        let process = reader.process();
        // Without the other ranks of its job: `gruyere post` reads their records too.
        let Conclusion { cause, lines, .. } = Conclusion::of(&state, &[]);
        let exit = Exit::of(reader, &state.events.entries);
        Candidate {
            path: reader.path().to_owned(),
            pid: Some(process.pid),
            process: Some(process),
            user: other_user(reader),
            since: last_sign,
            exit,
            cause: Some(cause),
            remedy: remedy(&lines),
            says: unfold(&lines).into_iter().next().unwrap_or_default(),
        }
    }

    fn command(&self) -> &str {
        self.process.as_ref().map_or("-", |process| &process.command)
    }

    /// Prefix of the command.
    fn note(&self) -> String {
        self.user.map(|user| format!("of user {user}: ")).unwrap_or_default()
    }
}

/// First words of the advice in a conclusion.
const TO_DO: &str = "To do: ";

/// The advice of a conclusion, in a single line.
pub fn remedy(lines: &[String]) -> Option<String> {
    unfold(lines).into_iter().find(|line| line.starts_with(TO_DO))
}

/// Why a record can't be read, in few words: the context names the file.
pub fn unreadable(error: &ReadError) -> String {
    match error {
        ReadError::Version { .. } => error.reason(),
        error => format!("can't be read: {}", error.reason()),
    }
}

/// The file's owner, if another user.
fn other_user(reader: &Reader<'_>) -> Option<u32> {
    reader.owner().filter(|&user| user != effective_user())
}

/// Whether the last request was refused.
pub fn ran_out(events: &[Event]) -> bool {
    last_refused(events).is_some()
}

/// The name that the user types to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The pid, which begins the line; a conclusion ends it.
    Pid,
    /// The file of the record, for equal pids. It ends the line, and is never cut.
    File,
}

/// Width of the terminal behind `stream`; else `$COLUMNS`, else 80.
pub fn columns(stream: impl AsFd) -> usize {
    let said = || std::env::var("COLUMNS").ok()?.parse().ok();
    terminal_size::terminal_size_of(stream)
        .map(|(width, _)| usize::from(width.0))
        .or_else(said)
        .filter(|&columns| columns > 0)
        .unwrap_or(COLUMNS)
}

/// `candidates` as a table of at most `columns` columns, in their order, each with its end; where
/// that leaves no room for a conclusion, it is below its process.
pub fn table(candidates: &[Candidate], by: By, columns: usize) -> String {
    let has_ranks = candidates.iter().any(|one| one.process.as_ref().is_some_and(has_rank));
    let last = if by == By::File { "FILE" } else { "CONCLUSION" };
    let most_command = (columns / COMMANDS_PART).saturating_sub(8).max(LEAST_COMMAND);
    let commands: Vec<&str> = candidates.iter().map(Candidate::command).collect();
    let commands = command::told_apart(&commands, most_command);
    let mut rows = vec![["PID", "RANK", "AGE", "EXIT", "COMMAND", last].map(str::to_owned)];
    rows.extend(candidates.iter().zip(commands).map(|(one, command)| row(one, command, by)));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let [of_pid, of_rank, of_age, of_exit, of_command] =
        [0, 1, 2, 3, 4].map(|column| width(column).unwrap_or(0));
    let of_command = of_command.min(most_command);
    let mut out = String::new();
    let before_command =
        of_pid + 2 + if has_ranks { of_rank + 2 } else { 0 } + of_age + 2 + of_exit + 2;
    let is_stacked =
        by == By::Pid && columns.saturating_sub(before_command + of_command + 2) < LEAST_CONCLUSION;
    let is_known = candidates.iter().map(|one| one.process.is_some() || by == By::File);
    for ([pid, rank, age, exit, command, last], is_known) in
        rows.iter().zip([true].into_iter().chain(is_known))
    {
        let rank = if has_ranks { format!("{rank:>of_rank$}  ") } else { String::new() };
        let start = format!("{pid:>of_pid$}  {rank}{age:>of_age$}  {exit:<of_exit$}  ");
        if is_stacked {
            let command = if is_known { command.as_str() } else { "-" };
            let command = cut(command, columns.saturating_sub(before_command).max(1));
            out.push_str(&format!("{start}{command}\n"));
            for line in wrap(last, columns.saturating_sub(INDENT.len()), "") {
                out.push_str(&format!("{INDENT}{line}\n"));
            }
            continue;
        }
        if !is_known {
            // In the command's place, the reason why there is none: in a single line.
            out.push_str(&cut(&format!("{start}{last}"), columns));
            out.push('\n');
            continue;
        }
        let command = cut(command, of_command);
        let head = format!("{start}{command:<of_command$}  ");
        let room = columns.saturating_sub(head.chars().count());
        let lines = match by {
            // A conclusion wraps below, rather than being cut.
            By::Pid => wrap(last, room, ""),
            By::File => vec![last.clone()],
        };
        let beside = " ".repeat(head.chars().count());
        for (line, before) in lines.iter().zip([&head].into_iter().chain(repeat(&beside))) {
            out.push_str(format!("{before}{line}").trim_end());
            out.push('\n');
        }
    }
    out
}

/// Cuts at the first full stop before another sentence: a list needs only enough to distinguish its
/// items.
fn first_sentence(text: &str) -> &str {
    let begins = |at: usize| text[at + 2..].starts_with(char::is_uppercase);
    let end = text.match_indices(". ").map(|(at, _)| at).find(|&at| begins(at));
    end.map_or(text, |end| &text[..end])
}

fn has_rank(process: &Process) -> bool {
    process.rank.is_some()
}

fn row(candidate: &Candidate, command: String, by: By) -> [String; 6] {
    let process = candidate.process.as_ref();
    let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    let pid = number(candidate.pid);
    let rank = number(process.and_then(|process| process.rank));
    let last = match by {
        By::Pid => first_sentence(&candidate.says).to_owned(),
        By::File => candidate.path.display().to_string(),
    };
    let exit = candidate.exit.word().to_owned();
    let command = candidate.note() + &command;
    let cells = [pid, rank, age(candidate.since), exit, command, last];
    cells.map(|cell| plain(&cell))
}

/// Time since `time`, in the largest unit of which it has two.
pub fn age(time: SystemTime) -> String {
    let seconds = SystemTime::now().duration_since(time).map_or(0, |age| age.as_secs());
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A process in a sentence: its pid, command and rank.
pub fn in_words(path: &Path, process: &Process) -> String {
    let rank = process.rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
    let command = shown_command(&process.command);
    match command.is_empty() {
        true => format!("{} ({}{rank})", process.pid, path.display()),
        false => format!("{} ({}{rank})", process.pid, plain(&command)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gruyere_record::EventKind;
    use gruyere_record::layout::VERSION;

    use super::*;

    fn candidate(pid: u64, rank: Option<u64>, seconds: u64, says: &str) -> Candidate {
        let process = Process {
            pid,
            rank,
            command: "/usr/bin/python3 -m gruyere train_a_large_model.py --batch 8".to_owned(),
            ..Process::default()
        };
        Candidate {
            path: PathBuf::from(format!("/dev/shm/gruyere-1-{pid}-3-0.record")),
            pid: Some(pid),
            process: Some(process),
            user: None,
            since: SystemTime::now() - Duration::from_secs(seconds),
            exit: Exit::Unclean,
            cause: None,
            says: says.to_owned(),
            remedy: None,
        }
    }

    #[test]
    fn a_list_fits_and_a_conclusion_goes_on_below_in_its_column() {
        let says = "train.py:28 keeps 62.5 MiB a step since step 3, in blocks that nothing frees";
        let two = [candidate(7, None, 3 * 60, says), candidate(123_456, None, 3 * 86_400, "short")];
        for columns in [60, 80, 120, 200] {
            let table = table(&two, By::Pid, columns);
            let lines: Vec<&str> = table.lines().collect();
            assert!(lines.iter().all(|line| line.chars().count() <= columns), "{table}");
            assert!(lines[1].contains("     7   3 min  unclean  train_a_"), "{table}");
            let second = lines.iter().position(|line| line.starts_with("123456  3 days  "));
            // The conclusion is whole, in its own column.
            let column = lines[0].find("CONCLUSION").expect("a heading");
            let told = lines[1..second.expect("a second row")].iter();
            let told: Vec<&str> = told.map(|line| line[column..].trim()).collect();
            assert_eq!((told.join(" "), told.len() > 1), (says.to_owned(), columns < 160));
            assert!(!table.contains("RANK"), "{table}");
        }
        let ranks = [candidate(7, Some(3), 1, says), candidate(8, None, 1, says)];
        assert!(table(&ranks, By::Pid, 80).contains("PID  RANK"));
        let files = table(&two, By::File, 60);
        assert!(files.lines().all(|line| line.ends_with("FILE") || line.ends_with("-3-0.record")));
    }

    #[test]
    fn on_a_narrow_terminal_a_conclusion_is_whole_below_its_process() {
        let says = "train.py:28 keeps 62.5 MiB a step since step 3, in blocks that nothing frees";
        let path = PathBuf::from("/dev/shm/gruyere-4026531836-4242-99-0.record");
        let says_unreadable = unreadable(&ReadError::Version { path, version: 3, locked: None });
        let unknown =
            Candidate { process: None, pid: Some(4242), ..candidate(1, None, 9, &says_unreadable) };
        let table = table(&[candidate(7, None, 3 * 60, says), unknown], By::Pid, 40);
        assert!(table.lines().all(|line| line.chars().count() <= 40), "{table}");
        let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("COMMAND CONCLUSION 7 3 min unclean"), "{table}");
        assert!(words.contains(says) && words.contains(&says_unreadable), "{table}");
    }

    #[test]
    fn a_record_of_another_version_is_one_line_with_the_number_of_its_process() {
        let path = PathBuf::from("/dev/shm/gruyere-4026531836-4242-99-0.record");
        let error = ReadError::Version { path, version: 3, locked: None };
        let pid = sweep::pid(error.path());
        let says = unreadable(&error);
        let other = Candidate { pid, process: None, ..candidate(1, None, 9 * 60, &says) };
        for columns in [60, 80, 120] {
            let table =
                table(&[candidate(7, None, 3 * 60, "short"), other.clone()], By::Pid, columns);
            let last = table.lines().last().expect("a row");
            assert_eq!(table.lines().count(), 3, "{table}");
            assert!(
                last.starts_with("4242  9 min  unclean  written by another version"),
                "{table}"
            );
            assert!(last.chars().count() <= columns, "{table}");
            assert_eq!(
                last.contains(&format!("layout 3; this command reads {VERSION})")),
                columns > 110
            );
        }
    }

    #[test]
    fn a_list_has_the_first_sentence_of_a_conclusion() {
        let says = "The device is full: 1.5 GiB needed, device 1 GiB. Of what is live: 3% weights";
        assert_eq!(first_sentence(says), "The device is full: 1.5 GiB needed, device 1 GiB");
        let says = "a.py:3 keeps graphs (e.g. of f. in g) 52.2 MiB a step.";
        assert_eq!(first_sentence(says), says);
    }

    #[test]
    fn the_remedy_of_a_conclusion_is_one_line() {
        let lines = ["a.py:3 keeps 1 MiB", "  a step", "To do: find", "  what keeps it", "Then"];
        let lines = lines.map(str::to_owned);
        assert_eq!(remedy(&lines).as_deref(), Some("To do: find what keeps it"));
        assert_eq!(remedy(&lines[..2]), None);
    }

    #[test]
    fn what_a_record_says_is_on_one_line_of_the_terminal() {
        let table = table(&[candidate(7, None, 1, "a\nb\u{1b}[2J")], By::Pid, 120);
        assert!(table.lines().count() == 2 && !table.contains('\u{1b}'), "{table:?}");
    }

    #[test]
    fn a_process_ran_out_of_memory_if_nothing_was_served_after_the_refusal() {
        let event = |kind: EventKind| Event { kind: kind.name().to_owned(), ..Event::default() };
        let [malloc, free, refusal] =
            [EventKind::Malloc, EventKind::Free, EventKind::OutOfMemory].map(event);
        assert!(ran_out(&[malloc.clone(), refusal.clone(), free.clone(), free.clone()]));
        assert!(!ran_out(&[refusal, free, malloc]) && !ran_out(&[]));
    }

    #[test]
    fn an_age_is_told_in_the_unit_that_says_enough() {
        let ago = |seconds| age(SystemTime::now() - Duration::from_secs(seconds));
        assert_eq!(
            [5, 119, 120, 7199, 7200, 172_799, 172_800].map(ago),
            ["5 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 days"]
        );
    }
}
