//! Reports of what the heap does, for a profiler if the process has one.
//!
//! The heap reports what costs time or memory, and counts that change by more than a block: never
//! on the straight path of a malloc. Without a profiler each place costs a load and a branch. As
//! with the record, the heap only writes: a profiler calls nothing of the heap, and may be called
//! with the heap's locks held.

use std::sync::OnceLock;

/// Activities and moments that the heap reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum What {
    /// The heap takes memory from the driver, or maps pages where they are needed.
    Growth,
    /// Pages move. Inside [`What::Growth`].
    Stitch,
    /// The host waits for the device.
    HostWait,
    /// The heap makes a stream wait for another.
    StreamWait,
    /// Memory goes back to the device on request.
    Trim,
    /// A low-memory phase gives memory back.
    LowMemoryTrim,
    /// A climb of the reclaim ladder.
    Reclaim,
    /// The heap answered a request with out of memory.
    OutOfMemory,
    /// A training step is over.
    Step,
}

/// Counters, in bytes, of each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Held from the driver.
    Reserved,
    /// Handed to the program.
    Live,
    /// Freed, but streams may still use it.
    Pending,
    /// The largest request that held memory could satisfy.
    LargestRequest,
}

/// A receiver of the heap's reports; any thread may call it.
pub trait Profiler: Sync {
    /// Something begins on this thread; what begins in it, ends in it.
    fn begin(&self, what: What, bytes: u64);
    /// The latest open range of this thread ends.
    fn end(&self);
    /// Something has just happened.
    fn mark(&self, what: What, payload: u64);
    /// A device's counts, as they are now.
    fn sample(&self, device: u32, values: &[(Counter, u64)]);
}

static PROFILER: OnceLock<&'static dyn Profiler> = OnceLock::new();

/// Attaches the profiler of all heaps of the process. The first stays: false if there is one
/// already.
pub fn attach(profiler: &'static dyn Profiler) -> bool {
    PROFILER.set(profiler).is_ok()
}

/// Whether a profiler is attached.
#[inline]
pub fn is_attached() -> bool {
    PROFILER.get().is_some()
}

/// An open range; ends when dropped.
#[must_use]
pub(super) struct Range(&'static dyn Profiler);

impl Drop for Range {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Begins a range of this thread.
#[inline]
pub(super) fn range(what: What, bytes: u64) -> Option<Range> {
    let profiler = *PROFILER.get()?;
    profiler.begin(what, bytes);
    Some(Range(profiler))
}

#[inline]
pub(super) fn mark(what: What, payload: u64) {
    if let Some(profiler) = PROFILER.get() {
        profiler.mark(what, payload);
    }
}

/// Reports how many bytes a device holds.
#[inline]
pub(super) fn reserved(device: u32, bytes: u64) {
    sample(device, &[(Counter::Reserved, bytes)]);
}

/// Reports the live bytes of a device; calls `bytes` only with a profiler attached.
#[inline]
pub(super) fn live(device: u32, bytes: impl FnOnce() -> u64) {
    if is_attached() {
        sample(device, &[(Counter::Live, bytes())]);
    }
}

/// Reports gauges that do not follow every block: live bytes, bytes that streams may still use, and
/// the largest request that held memory could satisfy.
#[inline]
pub(super) fn gauges(device: u32, live: u64, pending: u64, largest_request: u64) {
    sample(
        device,
        &[
            (Counter::Live, live),
            (Counter::Pending, pending),
            (Counter::LargestRequest, largest_request),
        ],
    );
}

#[inline]
fn sample(device: u32, values: &[(Counter, u64)]) {
    if let Some(profiler) = PROFILER.get() {
        profiler.sample(device, values);
    }
}
