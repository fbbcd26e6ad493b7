//! Captures, graphs and their replay.

use super::{Gpu, Recorded, State, fail};
use crate::calls::{CallKind, Caller, current_caller};
use crate::capture::{Capture, CaptureMode, CaptureStatus, Graph};
use crate::config::CapturingIds;
use crate::error::{SimResult, code};
use crate::streams::StreamKey;

impl State {
    /// The stream's capture.
    pub(crate) fn capture_of(&self, key: StreamKey) -> Option<&Capture> {
        let id = self.streams.get(key).capture?;
        self.captures.iter().find(|capture| capture.id == id)
    }

    /// Reports a call of the allocator on a capturing stream.
    pub(crate) fn frown_at_capture(&mut self, kind: CallKind, key: StreamKey) {
        if let Some(id) = self.streams.get(key).capture {
            self.frown(kind, key, id);
        }
    }

    fn frown(&mut self, kind: CallKind, key: StreamKey, capture: u64) {
        if current_caller() == Caller::Allocator
            && let Some(oracle) = &mut self.oracle
        {
            oracle.report_capturing(kind.name(), key, capture);
        }
    }

    pub(crate) fn invalidate(&mut self, id: u64) {
        if let Some(capture) = self.captures.iter_mut().find(|capture| capture.id == id) {
            capture.invalidated = true;
        }
    }

    /// Refuses a call that a capture's mode forbids, and invalidates the capture.
    pub(crate) fn forbidden_by_capture(&mut self, kind: CallKind) -> SimResult<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        let forbidding: Vec<_> =
            self.captures.iter().filter(|c| c.forbids()).map(|c| (c.id, c.origin)).collect();
        for &(id, origin) in &forbidding {
            self.frown(kind, origin, id);
            self.invalidate(id);
        }
        if forbidding.is_empty() { Ok(()) } else { fail(kind, code::CAPTURE_UNSUPPORTED) }
    }

    /// Refuses a call that is never allowed on a capturing stream, and invalidates the capture.
    pub(crate) fn refused_by_capture(&mut self, kind: CallKind, key: StreamKey) -> SimResult<()> {
        match self.streams.get(key).capture {
            None => Ok(()),
            Some(id) => {
                self.frown(kind, key, id);
                self.invalidate(id);
                fail(kind, code::CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Refuses the id of a capturing stream if the configured driver does.
    pub(crate) fn id_in_capture(&mut self, kind: CallKind, key: StreamKey) -> SimResult<()> {
        match (self.config.capturing_ids, self.streams.get(key).capture) {
            (CapturingIds::Told, _) | (_, None) => Ok(()),
            (CapturingIds::Invalidate, Some(_)) => self.refused_by_capture(kind, key),
            (CapturingIds::Refused, Some(id)) => {
                self.frown(kind, key, id);
                fail(kind, code::CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Refuses a call that covers a whole device (a wait for it, an event behind all its work)
    /// while its streams capture, and invalidates their captures.
    pub(crate) fn no_capture_on(&mut self, kind: CallKind, device: u32) -> SimResult<()> {
        let on_device = |capture: &&Capture| self.streams.get(capture.origin).device == device;
        let conflicting: Vec<_> = self
            .captures
            .iter()
            .filter(on_device)
            .map(|capture| (capture.id, capture.origin))
            .collect();
        for &(id, origin) in &conflicting {
            self.frown(kind, origin, id);
            self.invalidate(id);
        }
        if conflicting.is_empty() { Ok(()) } else { fail(kind, code::CAPTURE_UNSUPPORTED) }
    }

    /// Refuses the host's query of an event recorded in a capture.
    pub(crate) fn captured_event<T>(&mut self, kind: CallKind, capture: u64) -> SimResult<T> {
        if let Some(origin) = self.captures.iter().find(|c| c.id == capture).map(|c| c.origin) {
            self.frown(kind, origin, capture);
        }
        self.invalidate(capture);
        fail(kind, code::CAPTURED_EVENT)
    }

    /// Handles a stream's wait that involves a capture; true: handled.
    pub(crate) fn wait_in_capture(
        &mut self,
        kind: CallKind,
        key: StreamKey,
        event: Recorded,
    ) -> SimResult<bool> {
        let own = self.streams.get(key).capture;
        match (own, event) {
            (None, Recorded::Captured(id)) => {
                let Some(capture) = self.captures.iter_mut().find(|c| c.id == id && !c.invalidated)
                else {
                    return fail(kind, code::CAPTURED_EVENT);
                };
                capture.streams.push(key);
                self.streams.get_mut(key).capture = Some(id);
                if let Some(oracle) = &mut self.oracle {
                    oracle.joined_capture(key);
                }
                Ok(true)
            }
            (None, _) => Ok(false),
            (Some(own), Recorded::Captured(id)) if own == id => Ok(true),
            (Some(_), Recorded::Not) => Ok(true),
            (Some(own), _) => {
                self.invalidate(own);
                fail(kind, code::CAPTURE_ISOLATION)
            }
        }
    }

    /// Adds a launch on a capturing stream to the graph; true: handled.
    pub(crate) fn launch_in_capture(
        &mut self,
        kind: CallKind,
        key: StreamKey,
        kernels: u64,
        each: u64,
    ) -> SimResult<bool> {
        let Some(id) = self.streams.get(key).capture else { return Ok(false) };
        match self.captures.iter_mut().find(|capture| capture.id == id) {
            Some(capture) if !capture.invalidated => {
                capture.kernels += kernels;
                capture.work += kernels * each;
                if let Some(oracle) = &mut self.oracle {
                    oracle.advance(key);
                }
                Ok(true)
            }
            _ => fail(kind, code::CAPTURE_INVALIDATED),
        }
    }
}

impl Gpu {
    /// The capture status of `stream`.
    pub fn capture_status(&self, device: u32, stream: usize) -> SimResult<CaptureStatus> {
        const KIND: CallKind = CallKind::CaptureStatus;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.query)?;
        let key = state.stream(KIND, device, stream)?;
        Ok(match state.capture_of(key) {
            None => CaptureStatus::None,
            Some(capture) if capture.invalidated => CaptureStatus::Invalidated,
            Some(capture) => CaptureStatus::Active(capture.id),
        })
    }

    /// Begins a capture on `stream`. Captures of one `group` may share memory, as those of one
    /// torch pool id do; `None`: a group of its own. Returns the capture's id. Code 900 on the
    /// legacy default stream.
    pub fn begin_capture(
        &self,
        device: u32,
        stream: usize,
        mode: CaptureMode,
        group: Option<u64>,
    ) -> SimResult<u64> {
        const KIND: CallKind = CallKind::BeginCapture;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        if stream <= 1 {
            return fail(KIND, code::CAPTURE_UNSUPPORTED);
        }
        let key = state.stream(KIND, device, stream)?;
        if state.streams.get(key).capture.is_some() {
            return fail(KIND, code::CAPTURE_UNSUPPORTED);
        }
        state.next_capture += 1;
        let id = state.next_capture;
        let group = group.unwrap_or_else(|| {
            state.next_group += 1;
            // Above any number that a caller picks by hand.
            (1 << 63) | state.next_group
        });
        state.streams.get_mut(key).capture = Some(id);
        let thread = std::thread::current().id();
        state.captures.push(Capture {
            id,
            origin: key,
            streams: vec![key],
            mode,
            thread,
            invalidated: false,
            kernels: 0,
            work: 0,
            group,
        });
        if let Some(oracle) = &mut state.oracle {
            oracle.capture_began(id, group, key);
        }
        Ok(id)
    }

    /// Ends the capture begun on `stream` and returns the graph. Code 901 if the capture had
    /// failed; it is over then too.
    pub fn end_capture(&self, device: u32, stream: usize) -> SimResult<u64> {
        const KIND: CallKind = CallKind::EndCapture;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        let key = state.stream(KIND, device, stream)?;
        let Some(index) = state.captures.iter().position(|capture| capture.origin == key) else {
            return fail(KIND, code::CAPTURE_UNMATCHED);
        };
        let capture = state.captures.swap_remove(index);
        for &stream in &capture.streams {
            state.streams.get_mut(stream).capture = None;
        }
        if let Some(oracle) = &mut state.oracle {
            oracle.capture_ended(capture.group, &capture.streams, !capture.invalidated);
        }
        if capture.invalidated {
            return fail(KIND, code::CAPTURE_INVALIDATED);
        }
        let Capture { id, kernels, work, group, .. } = capture;
        state.graphs.insert(id, Graph { kernels, work, group });
        Ok(id)
    }

    /// Launches a graph on `stream`: its kernels run one after the other and touch all memory of
    /// its captures.
    pub fn replay(&self, device: u32, graph: u64, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::GraphLaunch;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let key = state.stream(KIND, device, stream)?;
        let Some(&Graph { work, group, .. }) = state.graphs.get(&graph) else {
            return fail(KIND, code::INVALID_HANDLE);
        };
        state.refused_by_capture(KIND, key)?;
        let cost = state.config.costs.graph_launch;
        state.enqueue(key, 1, work, cost);
        if let Some(oracle) = &mut state.oracle {
            oracle.replayed(group, key);
        }
        Ok(())
    }

    /// Destroys a graph. A replay may still run; no further one is possible.
    pub fn graph_destroy(&self, device: u32, graph: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::GraphDestroy;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        match state.graphs.remove(&graph) {
            None => fail(KIND, code::INVALID_HANDLE),
            Some(gone) => {
                if let Some(oracle) = &mut state.oracle {
                    oracle.graph_destroyed(gone.group);
                }
                Self::drop_graph_memory(state, graph);
                Ok(())
            }
        }
    }

    /// Kernels in a graph, and their total time, nanoseconds; `None`: no such graph.
    pub fn graph_work(&self, graph: u64) -> Option<(u64, u64)> {
        self.lock().graphs.get(&graph).map(|graph| (graph.kernels, graph.work))
    }
}
