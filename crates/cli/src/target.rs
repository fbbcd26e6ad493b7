//! Finds a command's record: by process, or by file.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gruyere_record::claim::Claim;
use gruyere_record::facts::Process;
use gruyere_record::memfds;
use gruyere_record::open::effective_user;
use gruyere_record::record_dir::record_dir;
use gruyere_record::sweep::{self, Found, Listing, Opened, State};
use gruyere_record::{Owners, Reader, facts};

use crate::candidates::{self, By, Candidate, Dead, Exit};
use crate::ending;
use crate::failure::Failure;

/// Where the records are.
#[derive(clap::Args, Clone, Debug)]
pub struct Folder {
    /// The folder of the records. Default: $GRUYERE_RECORD_DIR, where programs keep theirs too,
    /// else /dev/shm.
    // Not clap's default in the help: it is broken if the path is long.
    #[arg(long, value_name = "FOLDER")]
    #[arg(default_value_os_t = record_dir(), hide_default_value = true)]
    pub directory: PathBuf,
    /// Also read other users' records, as far as the system permits. Without this, other users'
    /// files are not opened, not even by root.
    #[arg(long)]
    pub all_users: bool,
}

impl Folder {
    /// Whose records to read.
    pub fn owners(&self) -> Owners {
        if self.all_users { Owners::Any } else { Owners::Mine }
    }

    /// All records in the folder, and those without a file.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Listing, Failure> {
        self.read(|_| true)
    }

    /// The records that are `wanted`.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn read(&self, wanted: impl Fn(&Opened) -> bool) -> Result<Listing, Failure> {
        let files = sweep::read(&self.directory, self.owners(), &wanted);
        let memfds = memfds::read(&self.directory, self.owners(), wanted);
        let mut listing = match files {
            // Processes whose folder is missing have memfds.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !memfds.is_empty() => {
                Listing::default()
            }
            files => files.map_err(|error| self.failure(&error))?,
        };
        listing.found.extend(memfds);
        Ok(listing)
    }

    /// The records of living processes, those that can't be read, and the paths of other dead ones'
    /// records: for commands that read repeatedly, as reading a dead record copies it.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn living(&self) -> Result<Listing, Failure> {
        self.read(|opened| opened.state() != State::Stale || opened.expect_whole().is_err())
    }

    /// Checks that there are records to come, before a command that reads repeatedly begins.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn expect_readable(&self) -> Result<(), Failure> {
        match std::fs::read_dir(&self.directory) {
            // Processes whose folder is missing have memfds.
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.living().map(drop),
            folder => folder.map(drop).map_err(|error| self.failure(&error)),
        }
    }

    /// The records of living processes, read, and one of each dead one, unread, latest death first.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn living_and_dead(&self) -> Result<(Listing, Vec<Dead>), Failure> {
        let dead: RefCell<Vec<OfDead>> = RefCell::default();
        let listing = self.read(|opened| {
            if opened.state() != State::Stale {
                return true;
            }
            let one = Dead { last_seen: opened.last_seen(), path: opened.path().to_owned() };
            let process = opened.process().map(|process| (opened.owner(), process));
            let mut dead = dead.borrow_mut();
            match process.as_ref().and_then(|process| dead.iter_mut().find(|of| of.is(process))) {
                Some(of) => of.records.push(one),
                None => dead.push(OfDead { process, records: vec![one] }),
            }
            false
        })?;
        let owners = self.owners();
        let mut dead: Vec<Dead> =
            dead.into_inner().into_iter().flat_map(|of| of.telling(owners)).collect();
        dead.sort_by_key(|dead| std::cmp::Reverse((dead.last_seen, dead.path.clone())));
        Ok((listing, dead))
    }

    fn failure(&self, error: &std::io::Error) -> Failure {
        let folder = self.directory.display();
        Failure::new(format_args!(
            "{folder}: {error}; name the folder of the records with --directory"
        ))
    }
}

/// The records of a dead process: its own, or copies that it left, or both.
struct OfDead {
    /// The files' owner, and the process; `None` if unreadable.
    process: Option<(u32, Process)>,
    records: Vec<Dead>,
}

impl OfDead {
    fn is(&self, (owner, process): &(u32, Process)) -> bool {
        self.process.as_ref().is_some_and(|(of, other)| of == owner && process.is_same(other))
    }

    /// The record that stands for the process ([`ending::telling`]), last seen alive as any of it;
    /// each that can't be read stands for itself.
    fn telling(self, owners: Owners) -> Vec<Dead> {
        if self.records.len() == 1 {
            return self.records;
        }
        let last_seen = self.records.iter().map(|record| record.last_seen).max();
        let (mut readers, mut telling) = (Vec::new(), Vec::new());
        for record in self.records {
            match Reader::open_of(&record.path, owners) {
                Ok(reader) => readers.push((reader, record)),
                Err(_) => telling.push(record),
            }
        }
        let opened: Vec<&Reader<'_>> = readers.iter().map(|(reader, _)| reader).collect();
        let chosen = ending::telling(&opened);
        let chosen = readers.into_iter().nth(chosen).map(|(_, record)| record);
        telling.extend(chosen.zip(last_seen).map(|(one, last_seen)| Dead { last_seen, ..one }));
        telling
    }
}

/// Owner of a record, and how far it is verified.
#[derive(Clone, Copy, Debug)]
pub struct Whose {
    /// The owner of its file.
    pub user: Option<u32>,
    /// Whether the process was seen: it is the owner's, and began when the record says. Else only
    /// the file's owner vouches for it.
    pub is_seen: bool,
}

impl Whose {
    /// The owner of an open record.
    pub fn of(reader: &Reader<'_>, claim: &Claim) -> Whose {
        Whose { user: reader.owner(), is_seen: *claim == Claim::Seen }
    }

    /// Suffix for another user's pid; empty for ours.
    pub fn note(&self) -> String {
        match self.user.filter(|&user| user != effective_user()) {
            Some(user) if self.is_seen => format!(" of user {user}"),
            Some(user) => format!(" (says user {user})"),
            None => String::new(),
        }
    }
}

/// One record, named on the command line.
#[derive(clap::Args, Clone, Debug)]
pub struct Target {
    /// The process (its pid; in a container, the pid there, or PID@NAMESPACE) or its record file.
    /// Default: the only process that uses Gruyère, if there is only one.
    #[arg(value_name = "PID|FILE")]
    pub target: Option<String>,
    #[command(flatten)]
    pub folder: Folder,
}

impl Target {
    /// Opens the record. For a process, prefers the living to the dead, and our own pid namespace
    /// to others; for one that is gone, [`ending::telling`] of its records.
    ///
    /// # Errors
    /// No record or several match, or it can't be read.
    pub fn open(&self) -> Result<Reader<'static>, Failure> {
        let Some(target) = &self.target else { return only(&self.folder) };
        match pid(target) {
            Some((pid, namespace)) => of_process(pid, namespace, &self.folder),
            None => Ok(Reader::open_of(Path::new(target), self.folder.owners())?),
        }
    }
}

/// The pid in `PID` or `PID@NAMESPACE`, as `ps` and the exporter's labels write it.
fn pid(target: &str) -> Option<(u64, Option<u64>)> {
    match target.split_once('@') {
        Some((pid, namespace)) => Some((pid.parse().ok()?, Some(namespace.parse().ok()?))),
        None => Some((target.parse().ok()?, None)),
    }
}

/// The record of the only living process; if none lives, of the only dead one.
fn only(folder: &Folder) -> Result<Reader<'static>, Failure> {
    let (listing, dead) = folder.living_and_dead()?;
    let unread = unread(&listing);
    if let Some(living) = one_of(listing)? {
        return Ok(living);
    }
    let owners = folder.owners();
    match &dead[..] {
        [] => Err(unread.unwrap_or_else(|| none(folder))),
        [dead] => {
            Reader::open_of(&dead.path, owners).map_err(|error| Failure::new(error.in_folder()))
        }
        _ => {
            let candidates = dead.iter().filter_map(|dead| Candidate::dead(dead, owners));
            Err(several("no process runs, and several left a record", candidates, By::Pid))
        }
    }
}

/// The process of `listing`, if it is the only one.
fn one_of(listing: Listing) -> Result<Option<Reader<'static>>, Failure> {
    let believed = listing
        .found
        .into_iter()
        .filter(|found| found.state == State::Live && !matches!(found.claim, Claim::False(_)));
    let mut found: Vec<Reader<'_>> = believed.filter_map(|found| found.reader.ok()).collect();
    if found.len() > 1 {
        let what = format!("there are {} processes", found.len());
        return Err(several(&what, found.iter().map(Candidate::living), By::Pid));
    }
    Ok(found.pop())
}

/// Error: of the processes of `listing` that live, or may, the first whose record can't be read.
fn unread(listing: &Listing) -> Option<Failure> {
    let mut unread =
        listing.found.iter().filter_map(|found| Some((found, found.unread()?.in_folder())));
    let (first, reason) = unread.next()?;
    let whose = match (first.state, sweep::pid(&first.path)) {
        (State::Live, Some(pid)) => format!("process {pid} runs, but its record can't be read"),
        _ => "the record of a process that may run can't be read".to_owned(),
    };
    let more = match unread.count() {
        0 => String::new(),
        more => format!(" (and {more} more, which `gruyere ps` names)"),
    };
    Some(Failure::new(format_args!("{whose}: {reason}{more}")))
}

fn none(folder: &Folder) -> Failure {
    Failure::new(format_args!(
        "no process uses gruyere here: start one, as with `python -m gruyere train.py`, or name a \
         record file (records are in {})",
        folder.directory.display()
    ))
}

fn nobody_died(folder: &Folder) -> Failure {
    Failure::new(format_args!(
        "none of your processes left a record in {}, and none runs: a process leaves one if it is \
         killed, or if it ends with an out-of-memory error under `python -m gruyere`; if the \
         record is elsewhere, name its file",
        folder.directory.display()
    ))
}

/// Error: several processes match.
fn several(what: &str, candidates: impl Iterator<Item = Candidate>, by: By) -> Failure {
    let mut candidates: Vec<Candidate> = candidates.collect();
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.since));
    let name = if by == By::File { "name one of the files" } else { "name one" };
    let table = candidates::table(&candidates, by, candidates::columns(io::stderr()));
    Failure::new(format_args!("{what}; {name} (newest first):\n{}", table.trim_end()))
}

/// The record for `gruyere post`, and the other candidates.
pub struct LastDead {
    /// The process's record.
    pub reader: Reader<'static>,
    /// When it was last seen alive; `None`: the user named it, or it runs.
    pub last_seen: Option<SystemTime>,
    /// Whether another rank of its job died last, and this one ran out of memory.
    pub ran_out: bool,
    /// Others that died, latest first.
    pub others: Vec<Dead>,
}

impl Target {
    /// As [`Target::open`]; without a named process, the latest to die (of a job's ranks, the one
    /// that ran out of memory), and if none died, the living one.
    ///
    /// # Errors
    /// No record, or it can't be read.
    pub fn open_or_last_dead(&self) -> Result<LastDead, Failure> {
        let named =
            |reader| LastDead { reader, last_seen: None, ran_out: false, others: Vec::new() };
        if self.target.is_some() {
            return self.open().map(named);
        }
        let (listing, mut dead) = self.folder.living_and_dead()?;
        let mut trouble = None;
        while !dead.is_empty() {
            let one = dead.remove(0);
            match Reader::open_of(&one.path, self.folder.owners()) {
                Ok(reader) if !matches!(Claim::of(&reader), Claim::False(_)) => {
                    return Ok(telling_rank(reader, one, dead, self.folder.owners()));
                }
                Ok(_) => {}
                Err(error) => trouble = trouble.or(Some(error)),
            }
        }
        let unread = unread(&listing);
        match (one_of(listing)?, trouble) {
            (Some(living), _) => Ok(named(living)),
            (None, Some(error)) => Err(Failure::new(error.in_folder())),
            (None, None) => Err(unread.unwrap_or_else(|| nobody_died(&self.folder))),
        }
    }
}

/// `last`, which died last, or the first rank of its job that ran out of memory: the other ranks
/// wait for that one until the launcher ends them, later.
fn telling_rank(
    reader: Reader<'static>,
    last: Dead,
    mut others: Vec<Dead>,
    owners: Owners,
) -> LastDead {
    let job = reader.process();
    let ran_out = |reader: &Reader<'_>| Exit::of_record(reader).ran_out();
    let refused = |dead: &Dead| {
        let found = Reader::open_of(&dead.path, owners).ok()?;
        let is_of_job =
            job.is_of_job(&found.process()) && !matches!(Claim::of(&found), Claim::False(_));
        (is_of_job && ran_out(&found)).then_some(found)
    };
    // Latest first.
    let first = match job.is_of_job(&job) && !ran_out(&reader) {
        true => others.iter().enumerate().rev().find_map(|(at, dead)| Some((at, refused(dead)?))),
        false => None,
    };
    match first {
        Some((place, reader)) => {
            let chosen = std::mem::replace(&mut others[place], last);
            others.sort_by_key(|dead| std::cmp::Reverse(dead.last_seen));
            LastDead { reader, last_seen: Some(chosen.last_seen), ran_out: true, others }
        }
        None => LastDead { reader, last_seen: Some(last.last_seen), ran_out: false, others },
    }
}

/// The record of process `pid`, of this pid namespace if one is named.
fn of_process(
    pid: u64,
    namespace: Option<u64>,
    folder: &Folder,
) -> Result<Reader<'static>, Failure> {
    let is_it = |process: &Process| {
        process.pid == pid && namespace.is_none_or(|namespace| process.pid_namespace == namespace)
    };
    let (mut trouble, mut unread) = (String::new(), Vec::new());
    let mut readers: Vec<(State, Claim, Reader<'static>)> = Vec::new();
    // The name has the pid between the namespace and the start time; the others need not be opened.
    let is_named = |path: &Path| sweep::pid(path) == Some(pid);
    // Without the folder, the process keeps its record where only its pid leads to it.
    let listing = match folder.directory.try_exists() {
        Ok(false) => {
            trouble.push_str(": there is no such folder");
            Listing::default()
        }
        _ => {
            let files =
                sweep::read(&folder.directory, folder.owners(), |opened| is_named(opened.path()));
            files.map_err(|error| folder.failure(&error))?
        }
    };
    let Listing { mut found, foreign, .. } = listing;
    found.extend(memfds::read(&folder.directory, folder.owners(), |opened| {
        opened.process().is_some_and(|process| is_it(&process))
    }));
    for Found { state, reader, claim, .. } in found {
        match reader {
            // Writing to a String cannot fail, here and below.
            Ok(reader) if is_it(&reader.process()) => match claim {
                Claim::False(lie) => {
                    let _ = write!(trouble, "; {} {lie}, and is left out", reader.path().display());
                }
                claim => readers.push((state, claim, reader)),
            },
            Ok(_) => {}
            Err(error) if is_named(error.path()) => unread.push(error.in_folder()),
            Err(_) => {}
        }
    }
    let ours = facts::pid_namespace();
    // A verified record precedes one that merely claims the pid.
    let order = |(state, claim, reader): &(State, Claim, Reader)| {
        (*state != State::Live, *claim != Claim::Seen, reader.process().pid_namespace != ours)
    };
    readers.sort_by_key(order);
    let readers = one_of_each(readers);
    let best = readers.first().map(order);
    let same = readers.iter().filter(|reader| Some(order(reader)) == best).count();
    let is_dead = readers.first().is_some_and(|(state, ..)| *state == State::Stale);
    if same > 1 && is_dead {
        // A container's program is process 1 each time that it is started again.
        let of_pid = readers.into_iter().take(same).map(|(_, _, reader)| reader);
        let mut of_pid: Vec<_> = of_pid.map(|reader| (reader.last_seen(), reader)).collect();
        of_pid.sort_by_key(|&(seen, _)| std::cmp::Reverse(seen));
        let (seen, reader) = of_pid.swap_remove(0);
        eprintln!(
            "gruyere: {same} dead processes had the pid {pid}: this is the one seen alive last, {} \
             ago ({}); name the file of another",
            candidates::age(seen),
            reader.path().display()
        );
        return Ok(reader);
    }
    if same > 1 {
        let what = format!("{same} records of a process {pid}");
        let same_pid = readers.iter().take(same).map(|(_, _, reader)| Candidate::living(reader));
        return Err(several(&what, same_pid, By::File));
    }
    if let Some((_, _, reader)) = readers.into_iter().next() {
        return Ok(reader);
    }
    // By the pid of our own namespace, not of the one that is named.
    let memfd = namespace.is_none().then(|| memfds::of_process(pid, folder.owners())).flatten();
    memfd.and_then(|found| found.reader.ok()).ok_or_else(|| {
        let of = namespace.map(|namespace| format!("@{namespace}")).unwrap_or_default();
        if !unread.is_empty() {
            let reasons = unread.join("; ");
            return Failure::new(format_args!(
                "the record of process {pid}{of} can't be read: {reasons}{trouble}"
            ));
        }
        let directory = folder.directory.display();
        let others = match foreign {
            0 => String::new(),
            _ => format!(
                " ({foreign} of other users were skipped: as root, `--all-users` reads them)"
            ),
        };
        Failure::new(format_args!(
            "process {pid}{of} has no record in {directory}{trouble}; `gruyere ps` lists the \
             existing ones{others}; only its owner can read a record"
        ))
    })
}

/// Of the records of a process that is gone, only the one that stands for it.
fn one_of_each(
    readers: Vec<(State, Claim, Reader<'static>)>,
) -> Vec<(State, Claim, Reader<'static>)> {
    let is_same = |one: &(State, Claim, Reader<'_>), other: &(State, Claim, Reader<'_>)| {
        (one.0, other.0) == (State::Stale, State::Stale)
            && one.2.owner() == other.2.owner()
            && one.2.process().is_same(&other.2.process())
    };
    let mut processes: Vec<Vec<(State, Claim, Reader<'static>)>> = Vec::new();
    for one in readers {
        match processes.iter_mut().find(|records| is_same(&records[0], &one)) {
            Some(records) => records.push(one),
            None => processes.push(vec![one]),
        }
    }
    let telling = |mut records: Vec<(State, Claim, Reader<'static>)>| {
        let readers: Vec<&Reader<'_>> = records.iter().map(|(_, _, reader)| reader).collect();
        let place = ending::telling(&readers);
        records.swap_remove(place)
    };
    processes.into_iter().map(telling).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_a_container_is_named_by_its_pid_and_namespace() {
        assert_eq!(pid("42"), Some((42, None)));
        assert_eq!(pid("3@4026532330"), Some((3, Some(4_026_532_330))));
        for file in ["", "@", "3@", "@4", "3@x", "./3@4", "gruyere-1-2-3-0.record"] {
            assert_eq!(pid(file), None, "{file}");
        }
    }
}
