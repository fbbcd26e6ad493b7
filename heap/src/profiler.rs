//! A profiler that is told what the heap does, where the process has one.
//!
//! It hears of what costs time or memory, and of counts where they change by more than a block:
//! never on the straight path of a malloc. Without one, each place costs a load and a branch. The
//! heap tells it as it tells the record: a profiler calls nothing of the heap's, and may be called
//! with the heap's locks held.

use std::sync::OnceLock;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum What {
    /// The heap takes memory from the driver, or maps pages where they are needed.
    Growth,
    /// Pages move. Inside [`What::Growth`].
    Stitch,
    /// The host waits for the device.
    HostWait,
    /// A stream is made to wait for another.
    StreamWait,
    /// Memory goes back to the device on request.
    Trim,
    /// A low-memory phase gives memory back.
    LowMemoryTrim,
    /// A turn on the reclaim ladder.
    Reclaim,
    /// A request was answered with out of memory.
    OutOfMemory,
    /// A training step is over.
    Step,
}

/// What is counted, in bytes, on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Held from the driver.
    Reserved,
    /// In the program's hands.
    Live,
    /// Freed, and streams may still use it.
    Pending,
    /// The largest request that what is held could satisfy.
    LargestRequest,
}

/// Who is told. Called from any thread.
pub trait Profiler: Sync {
    /// Something begins on this thread; what begins in it, ends in it.
    fn begin(&self, what: What, bytes: u64);
    /// What began last on this thread is over.
    fn end(&self);
    /// Something happened, just now.
    fn mark(&self, what: What, payload: u64);
    /// Counts of a device, as they are now.
    fn sample(&self, device: u32, values: &[(Counter, u64)]);
}

static PROFILER: OnceLock<&'static dyn Profiler> = OnceLock::new();

/// From now on `profiler` is told what the heaps of this process do. The first stays: true if it is
/// this one.
pub fn attach(profiler: &'static dyn Profiler) -> bool {
    PROFILER.set(profiler).is_ok()
}

/// Whether one is told.
#[inline]
pub fn is_attached() -> bool {
    PROFILER.get().is_some()
}

/// A range that is open, until it is dropped.
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

/// Tells how many bytes a device holds.
#[inline]
pub(super) fn reserved(device: u32, bytes: u64) {
    sample(device, &[(Counter::Reserved, bytes)]);
}

/// Tells how many bytes are live on a device; they are only looked up where somebody wants to know.
#[inline]
pub(super) fn live(device: u32, bytes: impl FnOnce() -> u64) {
    if is_attached() {
        sample(device, &[(Counter::Live, bytes())]);
    }
}

/// Tells what gauges of a device stand at that are not kept up with every block: bytes live, bytes
/// that streams may still use, and the largest request that what is held could satisfy.
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
