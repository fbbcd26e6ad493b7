//! Collectives and messages between ranks, and the work behind them.

use super::{Gpu, Recorded, State, fail};
use crate::calls::CallKind;
use crate::error::{SimResult, code};
use crate::oracle::StreamName;
use crate::rendezvous::{Deadlock, Meeting, Task, WorkId};
use crate::streams::StreamKey;

impl State {
    /// Enqueues `task` on the stream, behind its work so far and the open works `others`.
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

    /// Passes ended work to the timeline.
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

    /// The open works of `device`.
    pub(crate) fn open_works(&self, device: u32) -> Vec<WorkId> {
        let streams = (0..self.streams.len() as StreamKey).map(|key| self.streams.get(key));
        streams.filter(|stream| stream.device == device).filter_map(|stream| stream.open).collect()
    }

    /// Refuses a host wait for open work of `device`: with one host for all ranks it would never
    /// end. On real ranks the watchdog ends such a wait, so the code is that of a timeout.
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
    /// Sends to that rank.
    Send(u32),
    /// Receives from that rank.
    Receive(u32),
}

impl State {
    /// Enqueues work whose end depends on something unknown to the timeline. Code 801 if the stream
    /// captures.
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
        // Starts no earlier than its launch.
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
    /// of `ranks` devices runs, for `nanoseconds`, once the streams of all ranks have reached their
    /// n-th launches.
    ///
    /// Until then it and all work behind it are open; a host wait for it fails with code 702. Code
    /// 801 on a capturing stream, code 1 if the communicator has another number of ranks.
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
    /// all at once, each once the counterpart's stream has reached its half. A sender's n-th half
    /// on a `communicator` meets that receiver's n-th. The kernel ends with the last message,
    /// `nanoseconds` after that began; until then it is open, as in [`Gpu::launch_collective`].
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

    /// The streams with open work: collectives and messages not yet reached by all ranks, values
    /// not yet written, host functions not yet returned.
    pub fn open_streams(&self) -> Vec<StreamName> {
        let state = self.lock();
        let open = |&key: &StreamKey| state.streams.get(key).open.is_some();
        (0..state.streams.len() as StreamKey)
            .filter(open)
            .map(|key| state.stream_name(key))
            .collect()
    }

    /// A circle of streams that wait for each other, if any: no later launch can end their wait.
    pub fn deadlock(&self) -> Option<Deadlock> {
        let state = self.lock();
        let streams = state.rendezvous.cycle()?;
        Some(Deadlock { streams: streams.into_iter().map(|key| state.stream_name(key)).collect() })
    }
}
