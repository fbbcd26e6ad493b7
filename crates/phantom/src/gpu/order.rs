//! Streams, events, launches and host waits.

use super::{Event, Gpu, Recorded, State, fail};
use crate::calls::{CallKind, Caller, current_caller};
use crate::error::{SimError, SimResult, code};
use crate::oracle::Clock;
use crate::rendezvous::Task;
use crate::streams::{StreamKey, StreamKind};

impl State {
    /// Applies the rule of the legacy default stream: new work of `key` comes after the work of the
    /// streams that the rule names.
    pub(crate) fn follow_default_stream(&mut self, key: StreamKey) {
        let tail =
            self.streams.implied(key).iter().map(|&other| self.streams.get(other).tail).max();
        if let Some(tail) = tail {
            self.raise_tail(key, tail);
        }
        let open: Vec<_> = self
            .streams
            .implied(key)
            .iter()
            .filter_map(|&other| self.streams.get(other).open)
            .collect();
        for other in open {
            self.follow_open(key, other);
        }
        if let Some(oracle) = &mut self.oracle {
            for &other in self.streams.implied(key) {
                oracle.follow(key, other);
            }
        }
    }

    fn outlasts(&mut self, device: u32, stream: usize) {
        if let Some(key) = self.streams.resolve(device, stream) {
            self.streams.get_mut(key).lasting = true;
        }
    }

    pub(crate) fn raise_tail(&mut self, key: StreamKey, tail: u64) {
        let stream = self.streams.get_mut(key);
        stream.tail = stream.tail.max(tail);
        let device = &mut self.devices[stream.device as usize];
        device.tail = device.tail.max(stream.tail);
    }

    /// Enqueues `kernels` of `each` nanoseconds on the stream, at a host cost of `launch` each.
    pub(crate) fn enqueue(&mut self, key: StreamKey, kernels: u64, each: u64, launch: u64) {
        self.follow_default_stream(key);
        let tail = self.streams.get(key).tail;
        if self.streams.get(key).open.is_some() {
            let now = self.time.now();
            self.time.work(kernels * launch);
            let floor = (now + launch + kernels * each).max(now + kernels * launch + each);
            self.add_open(key, [], Task::Run { nanoseconds: kernels * each, floor });
        } else {
            let end = self.time.launch(tail, kernels, each, launch, self.config.run_ahead);
            self.raise_tail(key, end);
        }
        if let Some(oracle) = &mut self.oracle {
            oracle.advance(key);
        }
    }

    /// The host waits for everything on `device`.
    pub(crate) fn wait_for_device(&mut self, device: u32) {
        let tail = self.devices[device as usize].tail;
        self.time.wait_until(tail, current_caller());
        if let Some(oracle) = &mut self.oracle {
            oracle.host_saw_device(device);
        }
        self.synchronize_pools(device);
    }

    /// The host learns that the work recorded by `event` is done.
    fn host_saw_event(&mut self, event: usize) {
        if let Some(oracle) = &mut self.oracle
            && let Some(event) = self.events.get(&event)
        {
            oracle.host_saw(&event.clock);
        }
    }

    fn event(&self, kind: CallKind, event: usize) -> SimResult<&Event> {
        self.events.get(&event).ok_or(SimError { call: kind.name(), code: code::INVALID_HANDLE })
    }
}

impl Gpu {
    /// Creates an event in the context of `device`.
    pub fn event_create(&self, device: u32) -> SimResult<usize> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(CallKind::EventCreate, device, state.config.costs.event)?;
        state.next_event += 1;
        let handle = 0x4000_0000 + state.next_event * 0x10;
        state
            .events
            .insert(handle, Event { device, recorded: Recorded::Not, clock: Clock::default() });
        Ok(handle)
    }

    /// Destroys an event.
    pub fn event_destroy(&self, device: u32, event: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::EventDestroy;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        match state.events.remove(&event) {
            Some(_) => Ok(()),
            None => fail(KIND, code::INVALID_HANDLE),
        }
    }

    /// Records the work enqueued on `stream` so far. Code 400 if event and stream belong to
    /// different devices.
    pub fn event_record(&self, device: u32, event: usize, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::EventRecord;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        let key = state.stream(KIND, device, stream)?;
        if state.event(KIND, event)?.device != state.streams.get(key).device {
            return fail(KIND, code::INVALID_HANDLE);
        }
        state.frown_at_capture(KIND, key);
        let recorded = match state.capture_of(key) {
            Some(capture) if capture.invalidated => return fail(KIND, code::CAPTURE_INVALIDATED),
            Some(capture) => Recorded::Captured(capture.id),
            None => {
                state.follow_default_stream(key);
                let stream = state.streams.get(key);
                stream.open.map_or(Recorded::At(stream.tail), Recorded::Behind)
            }
        };
        if let Some(event) = state.events.get_mut(&event) {
            event.recorded = recorded;
            if let Some(oracle) = &mut state.oracle {
                oracle.record(key, &mut event.clock);
            }
        }
        Ok(())
    }

    /// Records all work enqueued on `device` so far, on any stream. Code 801 if the driver lacks
    /// the call; code 900 while a stream of the device captures, and the capture fails.
    pub fn context_event_record(&self, device: u32, event: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::ContextEventRecord;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        if !state.config.context_events {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        if state.event(KIND, event)?.device != device {
            return fail(KIND, code::INVALID_HANDLE);
        }
        state.no_capture_on(KIND, device)?;
        let recorded = match state.open_works(device) {
            works if works.is_empty() => Recorded::At(state.devices[device as usize].tail),
            works => {
                let marks = state.streams.marks(device);
                let tail = state.devices[device as usize].tail;
                state.streams.get_mut(marks).tail = tail;
                Recorded::Behind(state.add_open(
                    marks,
                    works,
                    Task::Run { nanoseconds: 0, floor: 0 },
                ))
            }
        };
        if let Some(event) = state.events.get_mut(&event) {
            event.recorded = recorded;
            if let Some(oracle) = &mut state.oracle {
                oracle.record_device(device, &mut event.clock);
            }
        }
        Ok(())
    }

    /// True once the recorded work is done (or nothing was recorded).
    pub fn event_query(&self, device: u32, event: usize) -> SimResult<bool> {
        const KIND: CallKind = CallKind::EventQuery;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        state.forbidden_by_capture(KIND)?;
        let recorded = state.event(KIND, event)?.recorded;
        match recorded {
            Recorded::Not => Ok(true),
            Recorded::At(time) if state.is_done(time) => {
                state.host_saw_event(event);
                Ok(true)
            }
            Recorded::At(_) | Recorded::Behind(_) => Ok(false),
            Recorded::Captured(capture) => state.captured_event(KIND, capture),
        }
    }

    /// Nanoseconds from the end of the work recorded by `from` to that of `to`; `None`: not done
    /// yet. Refused if either was never recorded, or the events belong to two devices.
    pub fn event_elapsed(&self, device: u32, from: usize, to: usize) -> SimResult<Option<i64>> {
        const KIND: CallKind = CallKind::EventQuery;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        if state.event(KIND, from)?.device != state.event(KIND, to)?.device {
            return fail(KIND, code::INVALID_HANDLE);
        }
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([from, to]) {
            match state.event(KIND, event)?.recorded {
                Recorded::At(at) if at <= state.time.now() => *time = at,
                Recorded::At(_) | Recorded::Behind(_) => return Ok(None),
                Recorded::Not | Recorded::Captured(_) => return fail(KIND, code::INVALID_HANDLE),
            }
        }
        Ok(Some(times[1].cast_signed() - times[0].cast_signed()))
    }

    /// Waits on the host until the recorded work is done.
    pub fn event_synchronize(&self, device: u32, event: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::EventSynchronize;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.synchronize)?;
        state.forbidden_by_capture(KIND)?;
        let owner = state.event(KIND, event)?.device;
        match state.event(KIND, event)?.recorded {
            Recorded::Not => {}
            Recorded::At(time) => {
                state.time.wait_until(time, current_caller());
                state.host_saw_event(event);
            }
            Recorded::Behind(_) => return fail(KIND, code::LAUNCH_TIMEOUT),
            Recorded::Captured(capture) => return state.captured_event(KIND, capture),
        }
        state.synchronize_pools(owner);
        Ok(())
    }

    /// Makes later work of `stream` wait for `event`.
    pub fn stream_wait_event(&self, device: u32, stream: usize, event: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::StreamWaitEvent;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        let key = state.stream(KIND, device, stream)?;
        let recorded = state.event(KIND, event)?.recorded;
        state.frown_at_capture(KIND, key);
        let in_capture = state.wait_in_capture(KIND, key, recorded)?;
        match recorded {
            Recorded::At(time) if !in_capture => state.raise_tail(key, time),
            Recorded::Behind(work) if !in_capture => state.follow_open(key, work),
            _ => {}
        }
        if let Some(oracle) = &mut state.oracle
            && let Some(event) = state.events.get(&event)
        {
            oracle.wait(key, &event.clock);
        }
        Ok(())
    }

    /// Creates a stream of `device`.
    pub fn stream_create(&self, device: u32, kind: StreamKind) -> SimResult<usize> {
        const KIND: CallKind = CallKind::StreamCreate;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.stream_create)?;
        if kind == StreamKind::Legacy {
            return state.refuse(KIND, "creation of a default stream", 0);
        }
        let handle = state.streams.create(device, kind);
        if current_caller() == Caller::Allocator {
            state.outlasts(device, handle);
        }
        Ok(handle)
    }

    /// The program promises the allocator that this stream lasts until destroyed (see
    /// [`crate::Config::vouched_streams`]). Not a driver call.
    pub fn stream_lasts(&self, device: u32, stream: usize) {
        self.lock().outlasts(device, stream);
    }

    /// Destroys a stream; its work goes on. Its handle is recycled next.
    pub fn stream_destroy(&self, device: u32, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::StreamDestroy;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.stream_create)?;
        if stream <= 2 {
            return fail(KIND, code::INVALID_HANDLE);
        }
        let key = state.stream(KIND, device, stream)?;
        if state.streams.get(key).capture.is_some() {
            return fail(KIND, code::CAPTURE_UNSUPPORTED);
        }
        state.streams.destroy(key);
        if let Some(oracle) = &mut state.oracle {
            oracle.destroyed(key);
        }
        Ok(())
    }

    /// True once everything on `stream` is done.
    pub fn stream_query(&self, device: u32, stream: usize) -> SimResult<bool> {
        const KIND: CallKind = CallKind::StreamQuery;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.event)?;
        let key = state.stream(KIND, device, stream)?;
        state.refused_by_capture(KIND, key)?;
        state.forbidden_by_capture(KIND)?;
        state.follow_default_stream(key);
        let stream = state.streams.get(key);
        let (open, tail) = (stream.open.is_some(), stream.tail);
        let done = !open && state.is_done(tail);
        if done && let Some(oracle) = &mut state.oracle {
            oracle.host_saw_stream(key);
        }
        Ok(done)
    }

    /// Waits on the host until everything on `stream` is done.
    pub fn stream_synchronize(&self, device: u32, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::StreamSynchronize;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.synchronize)?;
        let key = state.stream(KIND, device, stream)?;
        state.refused_by_capture(KIND, key)?;
        state.forbidden_by_capture(KIND)?;
        state.follow_default_stream(key);
        let (tail, owner) = (state.streams.get(key).tail, state.streams.get(key).device);
        if state.streams.get(key).open.is_some() {
            return fail(KIND, code::LAUNCH_TIMEOUT);
        }
        state.time.wait_until(tail, current_caller());
        if let Some(oracle) = &mut state.oracle {
            oracle.host_saw_stream(key);
        }
        state.synchronize_pools(owner);
        Ok(())
    }

    /// The stream's id, unique and never reused. Code 801 if the driver has no ids; on a capturing
    /// stream as [`crate::CapturingIds`] says.
    pub fn stream_id(&self, device: u32, stream: usize) -> SimResult<u64> {
        const KIND: CallKind = CallKind::StreamId;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.query)?;
        if !state.config.stream_ids {
            return fail(KIND, code::NOT_SUPPORTED);
        }
        let key = state.stream(KIND, device, stream)?;
        state.id_in_capture(KIND, key)?;
        Ok(u64::from(key) + 1)
    }

    /// The device of a stream.
    pub fn stream_device(&self, device: u32, stream: usize) -> SimResult<u32> {
        let mut state = self.lock();
        let key = state.stream(CallKind::DeviceQuery, device, stream)?;
        Ok(state.streams.get(key).device)
    }

    /// Waits on the host for all work of `device`.
    pub fn device_synchronize(&self, device: u32) -> SimResult<()> {
        const KIND: CallKind = CallKind::DeviceSynchronize;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter_for(KIND, device, state.config.costs.synchronize)?;
        state.no_capture_on(KIND, device)?;
        state.forbidden_by_capture(KIND)?;
        state.no_endless_wait(KIND, device)?;
        state.wait_for_device(device);
        Ok(())
    }

    /// Launches `kernels` kernels of `each` nanoseconds on `stream`; while it captures, they become
    /// part of the graph. Each costs the host [`crate::Costs::launch`], and the host blocks if the
    /// device lags too far behind.
    pub fn launch(&self, device: u32, stream: usize, kernels: u64, each: u64) -> SimResult<()> {
        const KIND: CallKind = CallKind::Launch;
        let mut guard = self.lock();
        let state = &mut *guard;
        if kernels == 0 {
            return Ok(());
        }
        state.enter(KIND, device)?;
        state.counts[current_caller() as usize].add(KIND, kernels - 1);
        let key = state.stream(KIND, device, stream)?;
        let launch = state.config.costs.launch;
        if state.launch_in_capture(KIND, key, kernels, each)? {
            state.time.work(kernels * launch);
            return Ok(());
        }
        state.enqueue(key, kernels, each, launch);
        Ok(())
    }

    /// Fills memory in the order of `stream`: here a kernel of no length. Code 1 if the range is
    /// not backed.
    pub fn memset(&self, device: u32, address: u64, bytes: u64, stream: usize) -> SimResult<()> {
        const KIND: CallKind = CallKind::Memset;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let key = state.stream(KIND, device, stream)?;
        let backed: u64 = state.backings.pieces(address, bytes).map(|piece| piece.bytes).sum();
        if backed != bytes {
            return state.refuse(KIND, "memset of a range that is not backed", address);
        }
        state.frown_at_capture(KIND, key);
        let launch = state.config.costs.launch;
        if state.launch_in_capture(KIND, key, 1, 0)? {
            state.time.work(launch);
            return Ok(());
        }
        state.enqueue(key, 1, 0, launch);
        state.note_copy(key, &[(address, bytes)]);
        Ok(())
    }
}
