//! Waits of a stream on the host: for values in memory, and for host functions.

use super::{Gpu, fail};
use crate::calls::CallKind;
use crate::error::{SimResult, code};
use crate::rendezvous::{Task, WorkId};
use crate::values::{Comparison, Condition};

/// An enqueued host function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostFunction(WorkId);

impl Gpu {
    fn launch_task(
        &self,
        kind: CallKind,
        device: u32,
        stream: usize,
        task: Task,
    ) -> SimResult<WorkId> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.enter(kind, device)?;
        let key = state.stream(kind, device, stream)?;
        let work = state.launch_open(kind, key, task)?;
        state.close_ended_works();
        Ok(work)
    }

    /// Makes later work of `stream` wait until the word at `address` fulfils `comparison` with
    /// `value`. A word is 0 until written. The wait is open, as a collective is
    /// ([`Gpu::launch_collective`]). Code 801 on a capturing stream.
    pub fn stream_wait_value(
        &self,
        device: u32,
        stream: usize,
        address: u64,
        value: u64,
        comparison: Comparison,
    ) -> SimResult<()> {
        let task = Task::Await(Condition { address, value, comparison });
        self.launch_task(CallKind::StreamWaitValue, device, stream, task).map(|_| ())
    }

    /// Writes a word in the order of `stream`. Code 801 on a capturing stream.
    pub fn stream_write_value(
        &self,
        device: u32,
        stream: usize,
        address: u64,
        value: u64,
    ) -> SimResult<()> {
        let task = Task::Write { address, value };
        self.launch_task(CallKind::StreamWriteValue, device, stream, task).map(|_| ())
    }

    /// The host writes a word. Not a driver call.
    pub fn host_write_value(&self, address: u64, value: u64) {
        let mut guard = self.lock();
        let now = guard.time.now();
        guard.rendezvous.write(address, value, now);
        guard.close_ended_works();
    }

    /// Enqueues a host function in the order of `stream`. Until [`Gpu::host_function_returns`] it
    /// is open, as a collective is. Code 801 on a capturing stream.
    pub fn launch_host_function(&self, device: u32, stream: usize) -> SimResult<HostFunction> {
        let task = Task::HostFunction { returned: None };
        self.launch_task(CallKind::HostFunction, device, stream, task).map(HostFunction)
    }

    /// The running host functions, by launch: reached by their streams and not returned.
    pub fn host_functions(&self) -> Vec<HostFunction> {
        self.lock().rendezvous.host_functions().into_iter().map(HostFunction).collect()
    }

    /// A host function returns, and its stream goes on. Code 1 if it does not run.
    pub fn host_function_returns(&self, function: HostFunction) -> SimResult<()> {
        let mut guard = self.lock();
        let now = guard.time.now();
        if !guard.rendezvous.host_function_returns(function.0, now) {
            return fail(CallKind::HostFunction, code::INVALID_VALUE);
        }
        guard.close_ended_works();
        Ok(())
    }
}
