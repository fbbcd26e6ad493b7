//! Reports of the harness to the oracle, and the oracle's findings.

use super::{Gpu, State};
use crate::calls::{CallKind, as_program};
use crate::oracle::{Fault, NewBlock};
use crate::streams::StreamKey;

impl State {
    /// The stream in a report of the harness; a fault if there is none.
    pub(crate) fn known_stream(
        &mut self,
        address: u64,
        device: u32,
        handle: usize,
    ) -> Option<StreamKey> {
        // Reports of the harness are about the program.
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
    /// The allocator has handed out `bytes` at `address` for `stream` of `device`. `id` names the
    /// block in reports. Call after the allocator's malloc returns. Address 0 is no block.
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

    /// As [`Gpu::block_malloc`], for a block outside any capture in the memory of the graphs of
    /// `group`: the program answers for replays beside it, the allocator for the order of frees.
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

    /// Whether a stream captures. Not a driver call; for the harness.
    pub fn is_capturing(&self, device: u32, stream: usize) -> bool {
        let mut guard = self.lock();
        let state = &mut *guard;
        let key = state.known_stream(0, device, stream);
        key.is_some_and(|key| state.streams.get(key).capture.is_some())
    }

    /// The program frees the block at `address`. Call before the allocator's free.
    pub fn block_free(&self, address: u64) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(oracle) = &mut state.oracle {
            oracle.free(address);
        }
    }

    /// The program also uses the block at `address` on `stream` of `device`.
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

    /// The number of faults.
    pub fn fault_count(&self) -> u64 {
        self.lock().oracle.as_ref().map_or(0, |oracle| oracle.fault_count())
    }

    /// Takes the faults so far.
    pub fn take_faults(&self) -> Vec<Fault> {
        self.lock().oracle.as_mut().map_or_else(Vec::new, |oracle| oracle.take_faults())
    }

    /// The number of live blocks reported by the harness.
    pub fn live_blocks(&self) -> usize {
        self.lock().oracle.as_ref().map_or(0, |oracle| oracle.live_blocks())
    }
}
