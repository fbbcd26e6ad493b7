//! Work with an unknown end at launch: a collective runs once all ranks have reached it; a message
//! once both halves are reached; a wait for a value ends with the write, and a host function when
//! it returns. Work behind such work waits too.
//!
//! The timeline knows the end of ordinary work at once. Work of these kinds and all work behind it
//! is *open*: this module keeps it, with the open work before it, until its end is known. Without
//! such work nothing is open. Open work never throttles the host, since its lag is unknown.

use std::collections::BTreeMap;
use std::fmt;

use rustc_hash::FxHashMap;

use crate::oracle::StreamName;
use crate::streams::StreamKey;
use crate::values::{Condition, Values};

/// Open work, by the order of its launch.
pub(crate) type WorkId = usize;

/// A meeting of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Meeting {
    /// The collective with this number on a communicator.
    Collective { communicator: u64, number: u64 },
    /// The message with this number from one rank to another.
    Message { communicator: u64, from: u32, to: u32, number: u64 },
}

/// The action of open work once its predecessors have ended.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Runs for `nanoseconds`, and ends at `floor` at the earliest.
    Run { nanoseconds: u64, floor: u64 },
    /// Meets its counterparts, all at once, and runs when they have arrived.
    Meet { meetings: Vec<Meeting> },
    /// Ends when the condition holds.
    Await(Condition),
    /// Writes a word.
    Write { address: u64, value: u64 },
    /// Runs on the host until the program reports its return.
    HostFunction { returned: Option<u64> },
}

#[derive(Debug)]
struct Work {
    stream: StreamKey,
    /// The open work before this.
    after: Vec<WorkId>,
    /// Earliest start, virtual nanoseconds: the end of the closed work before it.
    start: u64,
    task: Task,
}

/// Work with a known end.
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
    /// Duration: that of the slowest part.
    nanoseconds: u64,
    /// The end; `None`: some ranks are missing.
    over: Option<u64>,
}

/// All open work.
#[derive(Debug, Default)]
pub(crate) struct Rendezvous {
    open: BTreeMap<WorkId, Work>,
    next: WorkId,
    /// Collectives launched so far, by communicator and rank.
    launched: FxHashMap<(u64, u32), u64>,
    /// Halves of messages launched so far, by communicator, sender, receiver and side.
    messages: FxHashMap<(u64, u32, u32, bool), u64>,
    meetings: BTreeMap<Meeting, Ranks>,
    values: Values,
}

impl Rendezvous {
    /// The collective of the next launch of `rank` on `communicator`.
    pub(crate) fn next_collective(&mut self, communicator: u64, rank: u32) -> Meeting {
        let number = counted(self.launched.entry((communicator, rank)).or_default());
        Meeting::Collective { communicator, number }
    }

    /// The message of the next half on the sender's or the receiver's side.
    pub(crate) fn next_message(
        &mut self,
        communicator: u64,
        (from, to): (u32, u32),
        is_sender: bool,
    ) -> Meeting {
        let number = self.messages.entry((communicator, from, to, is_sender)).or_default();
        Meeting::Message { communicator, from, to, number: counted(number) }
    }

    /// The number of ranks in the meeting; `None`: no rank has launched it yet.
    pub(crate) fn expected(&self, meeting: Meeting) -> Option<u32> {
        self.meetings.get(&meeting).map(|ranks| ranks.expected)
    }

    /// Adds work of `stream` behind the open works `after`, no earlier than `start`.
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

    /// Adds a rank's part, of `nanoseconds`, to a meeting of `expected` ranks.
    pub(crate) fn join(&mut self, work: WorkId, meeting: Meeting, expected: u32, nanoseconds: u64) {
        let ranks = self.meetings.entry(meeting).or_default();
        ranks.expected = expected;
        ranks.nanoseconds = ranks.nanoseconds.max(nanoseconds);
        ranks.members.push(work);
    }

    /// Writes a word, by work that ends at `time` or by the host.
    pub(crate) fn write(&mut self, address: u64, value: u64, time: u64) {
        self.values.write(address, value, time);
    }

    /// The host functions that were called and have not returned.
    pub(crate) fn host_functions(&self) -> Vec<WorkId> {
        let runs = |work: &Work| {
            work.after.is_empty() && matches!(work.task, Task::HostFunction { returned: None })
        };
        self.open.iter().filter(|(_, work)| runs(work)).map(|(&id, _)| id).collect()
    }

    /// A running host function returns at `time`. False: no such function runs.
    pub(crate) fn host_function_returns(&mut self, work: WorkId, time: u64) -> bool {
        match self.open.get_mut(&work) {
            Some(Work { after, task: Task::HostFunction { returned }, .. })
                if after.is_empty() && returned.is_none() =>
            {
                *returned = Some(time);
                true
            }
            _ => false,
        }
    }

    /// Whether any work of the `chosen` streams is open.
    pub(crate) fn any(&self, chosen: impl Fn(StreamKey) -> bool) -> bool {
        self.open.values().any(|work| chosen(work.stream))
    }

    /// Closes every work with a known end, each after the works that it waited for.
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
                if let Some(end) = self.end_of(id) {
                    self.end(id, end, &mut ended);
                }
            }
            if ended.len() == before {
                return ended;
            }
        }
    }

    /// The end of work that waits for no other; `None`: not known yet.
    fn end_of(&mut self, id: WorkId) -> Option<u64> {
        let work = self.open.get(&id)?;
        match work.task {
            Task::Run { nanoseconds, floor } => Some((work.start + nanoseconds).max(floor)),
            Task::Await(condition) => self.values.holds_from(work.start, condition),
            Task::Write { .. } => Some(work.start),
            Task::HostFunction { returned } => returned.map(|time| time.max(work.start)),
            Task::Meet { ref meetings } => {
                let meetings = meetings.clone();
                // A part may end before another begins: both sides run.
                let ends: Vec<_> =
                    meetings.into_iter().map(|meeting| self.end_of_meeting(meeting)).collect();
                ends.into_iter().collect::<Option<Vec<u64>>>()?.into_iter().max()
            }
        }
    }

    /// The end of a meeting; `None`: some ranks are missing.
    fn end_of_meeting(&mut self, meeting: Meeting) -> Option<u64> {
        let ranks = self.meetings.get(&meeting)?;
        if ranks.over.is_some() {
            return ranks.over;
        }
        // Before that, none of its works has ended.
        let members: Vec<&Work> = ranks.members.iter().filter_map(|id| self.open.get(id)).collect();
        if members.len() < ranks.expected as usize
            || members.iter().any(|work| !work.after.is_empty())
        {
            return None;
        }
        let over = members.iter().map(|work| work.start).max().unwrap_or(0) + ranks.nanoseconds;
        self.meetings.get_mut(&meeting)?.over = Some(over);
        Some(over)
    }

    fn end(&mut self, id: WorkId, end: u64, ended: &mut Vec<Ended>) {
        let Some(work) = self.open.remove(&id) else { return };
        ended.push(Ended { work: id, stream: work.stream, end });
        match work.task {
            Task::Write { address, value } => self.write(address, value, end),
            Task::Meet { meetings } => meetings.into_iter().for_each(|at| self.leave(id, at)),
            _ => {}
        }
        for other in self.open.values_mut() {
            let waited = other.after.len();
            other.after.retain(|&before| before != id);
            if other.after.len() < waited {
                other.start = other.start.max(end);
            }
        }
    }

    /// `work` has ended; the meeting is over with the last of its works.
    fn leave(&mut self, work: WorkId, meeting: Meeting) {
        if let Some(ranks) = self.meetings.get_mut(&meeting) {
            ranks.members.retain(|&member| member != work);
            if ranks.members.is_empty() {
                self.meetings.remove(&meeting);
            }
        }
    }

    /// The open works that `work` needs to end: those before it, and those before its counterparts.
    fn needs(&self, work: &Work) -> Vec<WorkId> {
        let mut needs = work.after.clone();
        if let Task::Meet { meetings } = &work.task {
            let to_come = meetings
                .iter()
                .filter_map(|meeting| self.meetings.get(meeting))
                .filter(|ranks| ranks.over.is_none());
            let members = to_come.flat_map(|ranks| &ranks.members);
            needs.extend(members.filter_map(|id| self.open.get(id)).flat_map(|work| &work.after));
        }
        needs
    }

    /// The streams along a cycle of waits; `None`: no cycle, and the open work waits for later
    /// launches, writes and returns.
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

/// Returns the number and increments it.
fn counted(next: &mut u64) -> u64 {
    *next += 1;
    *next - 1
}

/// Streams that wait for each other in a circle: none can make progress.
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
