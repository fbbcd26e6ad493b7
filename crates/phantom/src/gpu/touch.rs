//! Reports of the harness about a program that allocates and frees by CUDA's own rules: its blocks,
//! and the memory that its kernels touch.

use super::{Gpu, State};
use crate::calls::CallKind;
use crate::error::SimResult;
use crate::oracle::Kernel;
use crate::streams::StreamKey;

impl State {
    /// The kernel just enqueued on `key`, of `nanoseconds`, reads and writes these ranges.
    pub(crate) fn note_touches(&mut self, key: StreamKey, nanoseconds: u64, ranges: &[(u64, u64)]) {
        let end = self.streams.get(key).tail;
        let start = end.saturating_sub(nanoseconds);
        if let Some(oracle) = &mut self.oracle {
            let by = oracle.last_use(key);
            for &(address, bytes) in ranges.iter().filter(|(_, bytes)| *bytes > 0) {
                oracle.touched(address, bytes, Kernel { by, start, end }, &self.backings);
            }
        }
    }

    /// The same for copies and fills, if the harness has reported the program's blocks.
    pub(crate) fn note_copy(&mut self, key: StreamKey, ranges: &[(u64, u64)]) {
        if self.oracle.as_ref().is_some_and(|oracle| oracle.touches.is_watching()) {
            self.note_touches(key, 0, ranges);
        }
    }
}

impl Gpu {
    /// The program got `bytes` at `address`, usable in the order of `stream`, or (`None`, as from
    /// `cudaMalloc`) at once by any stream. Call after the allocation returns.
    pub fn owns(&self, address: u64, bytes: u64, stream: Option<usize>) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if address == 0 || bytes == 0 {
            return;
        }
        let device = state.backings.holding(address).map_or(0, |backing| backing.device);
        let stream = stream.and_then(|handle| state.known_stream(address, device, handle));
        if let Some(key) = stream {
            state.follow_default_stream(key);
        }
        let now = state.time.now();
        if let Some(oracle) = &mut state.oracle {
            oracle.owns(address, bytes, stream, now, &state.backings);
        }
    }

    /// The program frees the block at `address`. Call before the call that frees it.
    pub fn disowns(&self, address: u64) {
        if let Some(oracle) = &mut self.lock().oracle {
            oracle.disowns(address);
        }
    }

    /// The program's blocks, and their bytes.
    pub fn owned(&self) -> (usize, u64) {
        self.lock().oracle.as_ref().map_or((0, 0), |oracle| oracle.touches.owned())
    }

    /// Launches a kernel of `nanoseconds` that reads and writes `ranges` (address, bytes). In a
    /// capture it is only launched: touches of replays are not judged.
    pub fn launch_touching(
        &self,
        device: u32,
        stream: usize,
        nanoseconds: u64,
        ranges: &[(u64, u64)],
    ) -> SimResult<()> {
        self.launch_and(device, stream, nanoseconds, |state, key| {
            state.note_touches(key, nanoseconds, ranges);
        })
    }

    /// Launches a copy, which touches `ranges` of device memory.
    pub fn launch_copy(&self, device: u32, stream: usize, ranges: &[(u64, u64)]) -> SimResult<()> {
        self.launch_and(device, stream, 0, |state, key| state.note_copy(key, ranges))
    }

    fn launch_and(
        &self,
        device: u32,
        stream: usize,
        nanoseconds: u64,
        then: impl FnOnce(&mut State, StreamKey),
    ) -> SimResult<()> {
        const KIND: CallKind = CallKind::Launch;
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(KIND, device)?;
        let key = state.stream(KIND, device, stream)?;
        let launch = state.config.costs.launch;
        if state.launch_in_capture(KIND, key, 1, nanoseconds)? {
            state.time.work(launch);
            return Ok(());
        }
        state.enqueue(key, 1, nanoseconds, launch);
        then(state, key);
        Ok(())
    }

    /// Whether the oracle watches.
    pub fn has_oracle(&self) -> bool {
        self.lock().oracle.is_some()
    }

    /// Prints every later fault on stderr as it is found.
    pub fn print_faults(&self) {
        if let Some(oracle) = &mut self.lock().oracle {
            oracle.loud = true;
        }
    }
}
