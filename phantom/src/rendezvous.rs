//! Work whose end is not known when it is launched: a collective runs on no rank before its
//! counterparts have been reached on all of them, and whatever comes behind it waits as well.
//!
//! The timeline knows the end of ordinary work at once. Work behind a collective that has not met
//! its counterparts is *open*: it is kept here with the open work it comes after, until its end can
//! be told. Nothing is open where no collective is. The host is never throttled by open work:
//! nobody knows how far that lags behind.

use std::collections::BTreeMap;
use std::fmt;

use rustc_hash::FxHashMap;

use crate::oracle::StreamName;
use crate::streams::StreamKey;

/// Open work, by the order of its launch.
pub(crate) type WorkId = usize;

/// A collective: the communicator, and its number on it.
pub(crate) type Meeting = (u64, u64);

/// What open work does once it may.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Runs for so many nanoseconds, and ends at `floor` at the earliest.
    Run { nanoseconds: u64, floor: u64 },
    /// Meets its counterparts; runs for so many nanoseconds when all are there.
    Meet { meeting: Meeting, nanoseconds: u64 },
}

#[derive(Debug)]
struct Work {
    stream: StreamKey,
    /// Open work that this comes after.
    after: Vec<WorkId>,
    /// No earlier than this, virtual nanoseconds: what it came after and has ended.
    start: u64,
    task: Task,
}

/// Work that has ended, or rather: whose end is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) work: WorkId,
    pub(crate) stream: StreamKey,
    pub(crate) end: u64,
}

#[derive(Debug, Default)]
struct Ranks {
    expected: u32,
    members: Vec<WorkId>,
}

/// All open work.
#[derive(Debug, Default)]
pub(crate) struct Rendezvous {
    open: BTreeMap<WorkId, Work>,
    next: WorkId,
    /// Collectives launched so far, by communicator and rank.
    launched: FxHashMap<(u64, u32), u64>,
    meetings: BTreeMap<Meeting, Ranks>,
}

impl Rendezvous {
    /// The collective that the next launch of `rank` on `communicator` takes part in.
    pub(crate) fn next_meeting(&mut self, communicator: u64, rank: u32) -> Meeting {
        let number = self.launched.entry((communicator, rank)).or_default();
        *number += 1;
        (communicator, *number - 1)
    }

    /// How many ranks the collective waits for; `None`: nobody has launched it yet.
    pub(crate) fn expected(&self, meeting: Meeting) -> Option<u32> {
        self.meetings.get(&meeting).map(|ranks| ranks.expected)
    }

    /// Adds work of `stream` behind the open works `after`, and no earlier than `start`.
    pub(crate) fn add(
        &mut self,
        stream: StreamKey,
        after: Vec<WorkId>,
        start: u64,
        task: Task,
    ) -> WorkId {
        let id = self.next;
        self.next += 1;
        self.open.insert(id, Work { stream, after, start, task });
        id
    }

    /// Adds a rank's part of a collective that `expected` ranks take part in.
    pub(crate) fn join(&mut self, work: WorkId, meeting: Meeting, expected: u32) {
        let ranks = self.meetings.entry(meeting).or_default();
        ranks.expected = expected;
        ranks.members.push(work);
    }

    /// Whether any work of the streams that `chosen` says is open.
    pub(crate) fn any(&self, chosen: impl Fn(StreamKey) -> bool) -> bool {
        self.open.values().any(|work| chosen(work.stream))
    }

    /// Closes what can be closed: the works whose ends are known by now, in an order in which each
    /// comes after what it waited for.
    pub(crate) fn close_ended(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        loop {
            let before = ended.len();
            let free: Vec<WorkId> = self
                .open
                .iter()
                .filter(|(_, work)| work.after.is_empty())
                .map(|(&id, _)| id)
                .collect();
            for id in free {
                // It may have ended as a counterpart's, in this very turn.
                let Some(work) = self.open.get(&id) else { continue };
                match work.task {
                    Task::Run { nanoseconds, floor } => {
                        let end = (work.start + nanoseconds).max(floor);
                        self.end(id, end, &mut ended);
                    }
                    Task::Meet { meeting, .. } => self.end_meeting(meeting, &mut ended),
                }
            }
            if ended.len() == before {
                return ended;
            }
        }
    }

    fn end_meeting(&mut self, meeting: Meeting, ended: &mut Vec<Ended>) {
        let Some(ranks) = self.meetings.get(&meeting) else { return };
        let members: Vec<&Work> = ranks.members.iter().filter_map(|id| self.open.get(id)).collect();
        if members.len() < ranks.expected as usize
            || members.iter().any(|work| !work.after.is_empty())
        {
            return;
        }
        let start = members.iter().map(|work| work.start).max().unwrap_or(0);
        let length = |work: &&Work| match work.task {
            Task::Run { nanoseconds, .. } | Task::Meet { nanoseconds, .. } => nanoseconds,
        };
        let end = start + members.iter().map(length).max().unwrap_or(0);
        for id in self.meetings.remove(&meeting).unwrap_or_default().members {
            self.end(id, end, ended);
        }
    }

    fn end(&mut self, id: WorkId, end: u64, ended: &mut Vec<Ended>) {
        let Some(work) = self.open.remove(&id) else { return };
        ended.push(Ended { work: id, stream: work.stream, end });
        for other in self.open.values_mut() {
            let waited = other.after.len();
            other.after.retain(|&before| before != id);
            if other.after.len() < waited {
                other.start = other.start.max(end);
            }
        }
    }

    /// The open works that `work` cannot end without: those before it, and those before its
    /// counterparts.
    fn needs(&self, work: &Work) -> Vec<WorkId> {
        let mut needs = work.after.clone();
        if let Task::Meet { meeting, .. } = work.task
            && let Some(ranks) = self.meetings.get(&meeting)
        {
            needs.extend(
                ranks.members.iter().filter_map(|id| self.open.get(id)).flat_map(|m| &m.after),
            );
        }
        needs
    }

    /// The streams along a cycle of waits; `None`: there is none, and what is open waits for
    /// launches to come.
    pub(crate) fn cycle(&self) -> Option<Vec<StreamKey>> {
        let mut done = Vec::new();
        self.open.keys().find_map(|&id| self.cycle_from(id, &mut Vec::new(), &mut done))
    }

    fn cycle_from(
        &self,
        id: WorkId,
        path: &mut Vec<WorkId>,
        done: &mut Vec<WorkId>,
    ) -> Option<Vec<StreamKey>> {
        if let Some(at) = path.iter().position(|&on_path| on_path == id) {
            return Some(path[at..].iter().map(|id| self.open[id].stream).collect());
        }
        if done.contains(&id) {
            return None;
        }
        path.push(id);
        let found = self
            .needs(&self.open[&id])
            .into_iter()
            .find_map(|need| self.cycle_from(need, path, done));
        path.pop();
        done.push(id);
        found
    }
}

/// Streams that wait for each other in a circle: none of them will ever make progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// Each waits for the next, the last for the first.
    pub streams: Vec<StreamName>,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no stream can make progress: ")?;
        for stream in &self.streams {
            write!(f, "{stream} waits for ")?;
        }
        match self.streams.first() {
            Some(first) => write!(f, "{first}"),
            None => write!(f, "itself"),
        }
    }
}
