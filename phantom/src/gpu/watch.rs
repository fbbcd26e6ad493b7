//! What the harness tells the oracle, and what it hears.

use super::{Gpu, State};
use crate::calls::{CallKind, as_program};
use crate::oracle::{Fault, NewBlock};
use crate::streams::StreamKey;

impl State {
    /// The stream that the harness speaks of; a fault where there is none.
    pub(crate) fn known_stream(
        &mut self,
        address: u64,
        device: u32,
        handle: usize,
    ) -> Option<StreamKey> {
        // What the harness tells of the program.
        let key = as_program(|| self.stream(CallKind::Launch, device, handle)).ok();
        if key.is_none()
            && let Some(oracle) = &mut self.oracle
        {
            oracle.report(Fault::UnknownStream { address, handle });
        }
        key
    }
}

impl Gpu {
    /// The allocator has handed out `bytes` at `address` for `stream` of `device`. `id` is the
    /// harness's name for the block, for reports. To be told after the allocator's malloc has
    /// returned. An address of 0 is no block.
    pub fn block_malloc(&self, id: u64, address: u64, bytes: u64, device: u32, stream: usize) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if address == 0 || bytes == 0 {
            return;
        }
        let Some(stream) = state.known_stream(address, device, stream) else { return };
        let capture = state.streams.get(stream).capture.unwrap_or(0);
        if capture == 0 {
            state.follow_default_stream(stream);
        }
        if let Some(oracle) = &mut state.oracle {
            oracle.malloc(
                NewBlock { id, address, bytes, device, stream, capture, apart: false },
                &state.backings,
            );
        }
    }

    /// As [`Gpu::block_malloc`], of a block that is of no capture, and lies in the memory of the
    /// graphs of `group`: replays beside it are the program's part, the order of frees is not.
    pub fn block_of_group(
        &self,
        id: u64,
        (address, bytes): (u64, u64),
        device: u32,
        stream: usize,
        group: u64,
    ) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(stream) = state.known_stream(address, device, stream) else { return };
        state.follow_default_stream(stream);
        if let Some(oracle) = &mut state.oracle {
            let capture = oracle.beside_captures(group);
            oracle.malloc(
                NewBlock { id, address, bytes, device, stream, capture, apart: true },
                &state.backings,
            );
        }
    }

    /// Whether a stream captures. No call of the driver: for those who watch.
    pub fn is_capturing(&self, device: u32, stream: usize) -> bool {
        let mut guard = self.lock();
        let state = &mut *guard;
        let key = state.known_stream(0, device, stream);
        key.is_some_and(|key| state.streams.get(key).capture.is_some())
    }

    /// The program gives the block at `address` back. To be told before the allocator's free is
    /// called.
    pub fn block_free(&self, address: u64) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(oracle) = &mut state.oracle {
            oracle.free(address);
        }
    }

    /// The program uses the block at `address` on `stream` of `device` too.
    pub fn block_record_stream(&self, address: u64, device: u32, stream: usize) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(stream) = state.known_stream(address, device, stream) else { return };
        if let Some(oracle) = &mut state.oracle {
            oracle.record_stream(address, stream);
        }
    }

    /// Every fault so far (the first ten thousand).
    pub fn faults(&self) -> Vec<Fault> {
        self.lock().oracle.as_ref().map_or_else(Vec::new, |oracle| oracle.faults().to_vec())
    }

    /// How many faults there were.
    pub fn fault_count(&self) -> u64 {
        self.lock().oracle.as_ref().map_or(0, |oracle| oracle.fault_count())
    }

    /// The faults so far, which are forgotten.
    pub fn take_faults(&self) -> Vec<Fault> {
        self.lock().oracle.as_mut().map_or_else(Vec::new, |oracle| oracle.take_faults())
    }

    /// Blocks that the harness has told of and not freed.
    pub fn live_blocks(&self) -> usize {
        self.lock().oracle.as_ref().map_or(0, |oracle| oracle.live_blocks())
    }
}
