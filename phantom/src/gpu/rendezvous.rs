//! Collectives and messages between ranks, and the work behind them.

use super::{Gpu, Recorded, State, fail};
use crate::calls::CallKind;
use crate::error::{SimResult, code};
use crate::oracle::StreamName;
use crate::rendezvous::{Deadlock, Meeting, Task, WorkId};
use crate::streams::StreamKey;

impl State {
    /// Puts `task` on the stream, behind what is there and behind the open works `others`.
    pub(crate) fn add_open(
        &mut self,
        key: StreamKey,
        others: impl IntoIterator<Item = WorkId>,
        task: Task,
    ) -> WorkId {
        let stream = self.streams.get(key);
        let after = stream.open.into_iter().chain(others).collect();
        let id = self.rendezvous.add(key, after, stream.tail, task);
        self.streams.get_mut(key).open = Some(id);
        id
    }

    /// Later work of `key` comes after the open work `other`.
    pub(crate) fn follow_open(&mut self, key: StreamKey, other: WorkId) {
        if self.streams.get(key).open != Some(other) {
            self.add_open(key, [other], Task::Run { nanoseconds: 0, floor: 0 });
        }
    }

    /// Gives what has ended to the timeline.
    pub(crate) fn close_ended_works(&mut self) {
        for ended in self.rendezvous.close_ended() {
            self.raise_tail(ended.stream, ended.end);
            let stream = self.streams.get_mut(ended.stream);
            stream.open = stream.open.filter(|&open| open != ended.work);
            for event in self.events.values_mut() {
                if event.recorded == Recorded::Behind(ended.work) {
                    event.recorded = Recorded::At(ended.end);
                }
            }
        }
    }

    /// The works of `device` that are open.
    pub(crate) fn open_works(&self, device: u32) -> Vec<WorkId> {
        let streams = (0..self.streams.len() as StreamKey).map(|key| self.streams.get(key));
        streams.filter(|stream| stream.device == device).filter_map(|stream| stream.open).collect()
    }

    /// Refuses a host wait for work of `device` that is open: with one host for all ranks it would
    /// never end. Real ranks end in their watchdog, so the code is that of a timeout.
    pub(crate) fn no_endless_wait(&self, kind: CallKind, device: u32) -> SimResult<()> {
        if self.rendezvous.any(|key| self.streams.get(key).device == device) {
            return fail(kind, code::LAUNCH_TIMEOUT);
        }
        Ok(())
    }

    fn stream_name(&self, key: StreamKey) -> StreamName {
        let stream = self.streams.get(key);
        StreamName { id: u64::from(key) + 1, handle: stream.handle, device: stream.device }
    }
}

/// One half of a message between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// To that rank.
    Send(u32),
    /// From that rank.
    Receive(u32),
}

impl State {
    /// Puts work on the stream that ends when something that the timeline does not know comes
    /// about. Code 801 where the stream captures.
    pub(crate) fn launch_open(
        &mut self,
        kind: CallKind,
        key: StreamKey,
        task: Task,
    ) -> SimResult<WorkId> {
        if self.streams.get(key).capture.is_some() {
            return fail(kind, code::NOT_SUPPORTED);
        }
        self.follow_default_stream(key);
        self.time.work(self.config.costs.launch);
        let launched = self.time.now();
        // Not before the host has launched it.
        self.raise_tail(key, launched);
        let work = self.add_open(key, [], task);
        if let Some(oracle) = &mut self.oracle {
            oracle.advance(key);
        }
        Ok(work)
    }

    fn launch_meeting(
        &mut self,
        key: StreamKey,
        meetings: Vec<Meeting>,
        ranks: u32,
        nanoseconds: u64,
    ) -> SimResult<()> {
        let task = Task::Meet { meetings: meetings.clone() };
        let work = self.launch_open(CallKind::Launch, key, task)?;
        for meeting in meetings {
            self.rendezvous.join(work, meeting, ranks, nanoseconds);
        }
        self.close_ended_works();
        Ok(())
    }
}

impl Gpu {
    /// Launches a collective kernel, as NCCL does: the n-th launch of a device on a `communicator`
    /// of `ranks` devices runs when the n-th launches of all of them have been reached by their
    /// streams, for `nanoseconds`.
    ///
    /// Until then it is open, and what comes behind it too; a host wait for it is refused with
    /// code 702. Code 801 on a stream that captures, code 1 where the communicator has another
    /// number of ranks.
    pub fn launch_collective(
        &self,
        device: u32,
        stream: usize,
        communicator: u64,
        ranks: u32,
        nanoseconds: u64,
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::Launch;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let key = state.stream(KIND, device, stream)?;
        if state.streams.get(key).capture.is_some() {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        let meeting = state.rendezvous.next_collective(communicator, device);
        if state.rendezvous.expected(meeting).is_some_and(|expected| expected != ranks) {
            return state.refuse(KIND, "collective with another number of ranks", communicator);
        }
        state.launch_meeting(key, vec![meeting], ranks, nanoseconds)
    }

    /// Launches a kernel that passes messages, as NCCL does with the sends and receives of a group:
    /// all at once, each with its own counterpart, whose stream must have reached it. The n-th half
    /// of a sender on a `communicator` meets the n-th of that receiver. It ends when the last of
    /// them is over, `nanoseconds` after it began; until then as [`Gpu::launch_collective`].
    pub fn launch_messages(
        &self,
        device: u32,
        stream: usize,
        communicator: u64,
        halves: &[Half],
        nanoseconds: u64,
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::Launch;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let key = state.stream(KIND, device, stream)?;
        if state.streams.get(key).capture.is_some() {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        let mut meeting = |half: &Half| match *half {
            Half::Send(to) => state.rendezvous.next_message(communicator, (device, to), true),
            Half::Receive(from) => {
                state.rendezvous.next_message(communicator, (from, device), false)
            }
        };
        let meetings = halves.iter().map(&mut meeting).collect();
        state.launch_meeting(key, meetings, 2, nanoseconds)
    }

    /// The streams whose work waits for what has not come about: collectives and messages that not
    /// all ranks have reached, values that nobody has written, host functions that have not
    /// returned.
    pub fn open_streams(&self) -> Vec<StreamName> {
        let state = self.lock();
        let open = |&key: &StreamKey| state.streams.get(key).open.is_some();
        (0..state.streams.len() as StreamKey)
            .filter(open)
            .map(|key| state.stream_name(key))
            .collect()
    }

    /// A circle of streams that wait for each other, if there is one: they will wait for ever,
    /// whatever is launched yet.
    pub fn deadlock(&self) -> Option<Deadlock> {
        let state = self.lock();
        let streams = state.rendezvous.cycle()?;
        Some(Deadlock { streams: streams.into_iter().map(|key| state.stream_name(key)).collect() })
    }
}
