//! Waits that the program did not ask for: one stream waits on the device for another, to have
//! memory that the other has freed.
//!
//! An event stands behind the frees of an epoch ([`super::streams`]). Once the requesting stream
//! has been made to wait for it, that stream's later work comes after those frees: they are ordered
//! before it, though they may not be done yet. So the requesting stream may have that memory at
//! once, and no other stream may. The host never stands still for it.
//!
//! A wait costs little on the host, and time on the device if the stream would otherwise go on. So
//! the allocator takes pages first, up to some slack above the peak of live bytes. Beyond, the
//! stream waits for one event, if that alone brings a free run that is long enough: of several, the
//! event with the least work of its stream before it. If the stream would stand idle for it, that
//! must be short: covered by what the host has enqueued since the event, or within a share of the
//! host's clock (`Device::wait_for_others`). An event behind all work of the device counts here
//! only if the stream would not stand idle, or if no stream but that of the run has work before it.
//! Else the stream waits for the *near* events: those with no more work before them than the stream
//! itself has before the wait. How long that work takes is unknown; it is measured in what the host
//! has freed meanwhile ([`super::streams::Unfinished`]). Only then do pages move. Memory that is
//! ordered before a stream's later work without any wait comes first, whatever `waits:` says
//! ([`crate::device::Device::allocate_ordered`]). What each part buys is in
//! docs/decisions/streams.md.
//!
//! Whether such a wait can close a cycle, and hang the program:
//!
//! - Each wait, the program's or the allocator's, makes work that the host enqueues from now on
//!   wait for work that is enqueued already. If work waits for nothing else, every dependency goes
//!   from the later to the earlier in the order of the host's calls, whichever threads make them,
//!   and there is no cycle. CUDA's own allocator, `cudaMallocAsync`, adds such waits by default
//!   (`cudaMemPoolReuseAllowInternalDependencies`).
//! - The argument ends where enqueued work waits for something later: a collective, for other
//!   processes or devices that may enqueue theirs in another order, or on the word of a host that
//!   has first waited for another stream; point-to-point communication likewise; a host function, a
//!   wait on a value in memory, or a kernel that polls memory, for what the host does after it has
//!   waited for another stream. `tests/heap/waits.rs` and `tests/heap/ranks.rs` have a cycle of
//!   each kind but the last; docs/decisions/streams.md has why nothing that one process sees makes
//!   ranks safe.
//!
//! So `waits:auto` assumes: one process, one device, and no work of the second kind. The loader
//! knows the process and says so ([`Permission`]); the heap sees the devices. Else streams wait
//! only to avoid out of memory, as with `waits:oom`.

use crate::number_set::NumberSet;
use crate::order::pending::{Wait, Work};
use crate::order::streams::{ALL_STREAMS, Streams};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};

const UNKNOWN: u8 = 0;
const ALLOWED: u8 = 1;
const FORBIDDEN: u8 = 2;

/// Whether waits close no cycle in this process, as far as its loader knows.
///
/// ```text
///   unknown  -> allowed     the loader knows the process: it is alone, and nothing in it waits for
///                           what comes later
///   unknown  -> forbidden   the loader, or the heap, has seen what may wait so
///   allowed  -> forbidden   likewise; what was enqueued until then waits for nothing later, so the
///                           waits that were added until then close no cycle
///   forbidden               for ever
/// ```
///
/// A request reads it and acts on it under a device's central lock; a thread that forbids takes
/// that lock afterwards ([`crate::Heap::forbid_waits`]). So when that thread goes on, and enqueues
/// what could be part of a cycle, every request that saw the permission has added its waits: none
/// of their events stands behind that work.
#[derive(Default)]
pub(crate) struct Permission(AtomicU8);

impl Permission {
    /// Notes that no wait can close a cycle. True if that is news.
    pub(crate) fn allow(&self) -> bool {
        self.0.compare_exchange(UNKNOWN, ALLOWED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Notes that a wait may close a cycle from now on. True if that is news.
    pub(crate) fn forbid(&self) -> bool {
        self.0.swap(FORBIDDEN, Ordering::SeqCst) != FORBIDDEN
    }

    /// Whether no wait can close a cycle.
    pub(crate) fn is_given(&self) -> bool {
        self.0.load(Ordering::SeqCst) == ALLOWED
    }
}

/// The waits between streams that the allocator has added, and those of the program that it was
/// told of.
#[derive(Default)]
pub(crate) struct Order {
    /// By waiter, by stream: what of the stream is ordered before the waiter's work to come.
    behind: HashMap<u32, HashMap<u32, Behind>>,
    /// By waiter, the latest of its waits: for which stream, and up to which clock of the host
    /// ([`Streams::host_clock`]). It tells how far behind the waiter is, and orders nothing.
    until: HashMap<u32, (u32, u64)>,
}

/// What of a stream is ordered before the later work of one that waits for it.
#[derive(Default)]
struct Behind {
    /// The last of its work.
    work: Work,
    /// That work and earlier, each with the waiter's open epoch when the wait had been added: also
    /// ordered before whatever waits for the waiter's work up to that epoch or a later one. The
    /// latest [`KEPT`].
    since: VecDeque<(u64, Work)>,
}

/// Waits of one stream for another that are kept for streams that wait for the first: it may have
/// gone on waiting before they do.
const KEPT: usize = 16;

impl Order {
    /// The last epoch of `stream` that comes before the later work of `waiter`, by these waits.
    pub(crate) fn of(&self, waiter: u32, stream: u32) -> u64 {
        self.before(waiter, stream).epoch
    }

    /// The last epoch of `stream` whose freed memory `waiter` may have, by these waits.
    pub(crate) fn reusable(&self, waiter: u32, stream: u32) -> u64 {
        self.before(waiter, stream).ripe
    }

    /// Whether a wait for `work` of `stream` would add nothing.
    pub(crate) fn has(&self, waiter: u32, stream: u32, work: Work) -> bool {
        let known = self.before(waiter, stream);
        known.max(work) == known
    }

    fn before(&self, waiter: u32, stream: u32) -> Work {
        if waiter == stream && stream != ALL_STREAMS {
            return Work { epoch: u64::MAX, ripe: u64::MAX };
        }
        let known = self.behind.get(&waiter).and_then(|streams| streams.get(&stream));
        known.map_or(Work::default(), |behind| behind.work)
    }

    /// Whether the later work of `waiter` comes after that epoch of that stream: the stream is past
    /// it, or `waiter` waits for it.
    pub(crate) fn is_before(&self, streams: &Streams, waiter: u32, (stream, epoch): Wait) -> bool {
        streams.completed(stream) >= epoch || self.of(waiter, stream) >= epoch
    }

    /// Whether `waiter` may have what that stream freed of its own in that epoch.
    pub(crate) fn may_reuse(&self, streams: &Streams, waiter: u32, (stream, epoch): Wait) -> bool {
        streams.reusable(stream) >= epoch || self.reusable(waiter, stream) >= epoch
    }

    /// Notes that the allocator has made `waiter` wait for `work` of `stream`.
    pub(crate) fn add(&mut self, waiter: u32, stream: u32, work: Work) {
        let behind = self.behind.entry(waiter).or_default().entry(stream).or_default();
        behind.work = behind.work.max(work);
    }

    /// Notes that `waiter` waits for what the host had enqueued on `stream` at `clock`.
    pub(crate) fn note_wait(&mut self, waiter: u32, stream: u32, clock: u64) {
        let until = self.until.entry(waiter).or_default();
        if clock >= until.1 {
            *until = (stream, clock);
        }
    }

    /// The stream for which `waiter` waits, and up to which clock of the host: its latest wait.
    pub(crate) fn latest_wait(&self, waiter: u32) -> Option<(u32, u64)> {
        self.until.get(&waiter).copied()
    }

    /// Notes that the program has made `waiter` wait for a stream up to an epoch, and so for what
    /// the program has made that work wait for. Forgets what `waiter` need not wait for any more.
    pub(crate) fn add_of_program(
        &mut self,
        streams: &Streams,
        waiter: u32,
        (stream, work): (u32, Work),
    ) {
        let open = streams.open_epoch(waiter);
        let inherited = self.behind.get(&stream).into_iter().flatten();
        let of_others = inherited.filter(|&(&other, _)| other != waiter);
        let of_others = of_others.filter_map(|(&other, behind)| {
            let known = behind.since.iter().rev().find(|(open, _)| *open <= work.epoch);
            known.map(|&(_, work)| (other, work))
        });
        let orders: Vec<(u32, Work)> = of_others.chain([(stream, work)]).collect();
        let row = self.behind.entry(waiter).or_default();
        for (stream, work) in orders {
            let behind = row.entry(stream).or_default();
            if work.epoch > behind.work.epoch {
                behind.work = behind.work.max(work);
                behind.since.push_back((open, behind.work));
                if behind.since.len() > KEPT {
                    behind.since.pop_front();
                }
            }
        }
        row.retain(|&stream, behind| behind.work.epoch > streams.completed(stream));
        if row.is_empty() {
            self.behind.remove(&waiter);
        }
    }

    /// Whether no wait is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.behind.is_empty()
    }

    /// Forgets streams whose numbers will pass to others.
    pub(crate) fn forget(&mut self, numbers: &[u32]) {
        let mut gone = NumberSet::default();
        numbers.iter().for_each(|&number| gone.insert(number));
        self.behind.retain(|&waiter, streams| {
            streams.retain(|&stream, _| !gone.contains(stream));
            !gone.contains(waiter) && !streams.is_empty()
        });
        self.until.retain(|&waiter, (stream, _)| !gone.contains(waiter) && !gone.contains(*stream));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_wait_of_a_stream_counts_until_a_number_passes_to_another() {
        let mut order = Order::default();
        order.note_wait(1, 2, 50);
        order.note_wait(1, 3, 40);
        assert_eq!((order.latest_wait(1), order.latest_wait(2)), (Some((2, 50)), None));
        assert!(order.is_empty(), "it orders nothing");
        order.note_wait(4, 5, 60);
        order.forget(&[2, 4]);
        assert_eq!((order.latest_wait(1), order.latest_wait(4)), (None, None));
    }
}
