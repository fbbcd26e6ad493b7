//! Who may reuse freed memory, and when: the one place of the rule of stream order.
//!
//! | freed memory | which stream may have it |
//! |---|---|
//! | free, of a stream | that stream at once |
//! | free, of a stream whose work on it is done (`Streams::completed`) | every stream, where memory is shared |
//! | free or waiting, ordered before the work to come of a stream (`Order`) | that stream |
//! | waiting for streams that used it | its stream, once each of them is past its use |

use crate::central::Central;
use crate::device::Device;
use crate::driver::DriverError;
use crate::heap::Heap;
use crate::order::pending::Wait;
use crate::order::streams::{ALL_STREAMS, Streams, Unfinished};
use crate::profiler::{self, What};
use crate::request::{Eviction, Growth, Request, Want};
use crate::runs::arena::{Run, RunId, UNOWNED};
use crate::settings::Waits;
use crate::shared::Shared;
use crate::sync::{MutexGuard, lock};
use gruyere_record::gauges::pool_of;
use gruyere_record::{DeviceGauge, EventKind, clock};
use std::collections::HashMap;
use std::time::Instant;

impl Device {
    /// A run for `want` from memory whose last work comes before whatever its stream is given to do
    /// from now on, though nobody knows yet that it is done: blocks that wait only for that stream
    /// itself, and what it has been made to wait for.
    pub(crate) fn allocate_ordered(
        &self,
        shared: &Shared,
        central: &mut Central,
        want: Want,
    ) -> Option<RunId> {
        let some = !central.pending.is_empty() || !central.order.is_empty();
        let _guard = if some && shared.shares() { self.query_guard()? } else { return None };
        central.complete_ordered_frees(&self.streams, want);
        central.fit_ordered(&self.streams, want)
    }

    /// A run for `want` from memory that other streams have freed: its stream waits for the event
    /// that alone brings one, of several for the one with the least work before it. Where none
    /// does, it waits for those that are `near` it, or all, until it has a run, and pages move
    /// where they can and that is not enough. `None`: nothing of the kind helps, or a capture is
    /// open.
    pub(crate) fn wait_for_others(
        &self,
        shared: &Shared,
        central: &mut Central,
        growth: &Growth<'_>,
        want: Want,
        near: bool,
    ) -> Option<RunId> {
        let _guard = self.query_guard()?;
        if !shared.shares() {
            return None;
        }
        self.fence_all(shared, Some(want.stream));
        let events = self.streams.unfinished(want.stream);
        let waits = central.single_waits(&self.streams, want);
        let is_enough = |event: &&Unfinished| {
            waits.get(&event.stream).is_some_and(|&epoch| epoch <= event.epoch)
        };
        if let Some(run) = events
            .iter()
            .find(is_enough)
            .and_then(|event| self.wait_for(shared, central, want, event))
        {
            return Some(run);
        }
        for event in events.iter().filter(|event| event.is_near || !near) {
            if let Some(run) = self.wait_for(shared, central, want, event) {
                return Some(run);
            }
        }
        let has_room = self.supply.make_room(central, growth, want);
        has_room.then(|| want.fit_or_join(&mut central.arenas)).flatten()
    }

    /// Makes the stream of `want` wait for an event, where that brings memory. The run for `want`,
    /// if there is one then.
    fn wait_for(
        &self,
        shared: &Shared,
        central: &mut Central,
        want: Want,
        &Unfinished { stream, epoch, .. }: &Unfinished,
    ) -> Option<RunId> {
        if central.order.of(want.stream, stream) >= epoch
            || !central.would_gain(stream, epoch)
            || !self.streams.make_wait(&*shared.driver, want.stream, stream, epoch)
        {
            return None;
        }
        central.order.add(want.stream, stream, epoch);
        profiler::mark(What::StreamWait, want.bytes);
        shared.record.event(EventKind::Wait, self.id as u8, 0, want.stream, 0, 0, clock::now());
        central.complete_ordered_frees(&self.streams, want);
        central.fit_ordered(&self.streams, want)
    }

    /// Records events behind the frees so far, once many blocks have begun to wait for streams
    /// ([`Central::fence_due`]): late events come behind work that has nothing to do with the
    /// frees, and a program whose memory waits for them takes fresh memory meanwhile. `named`: the
    /// stream that this call names.
    pub(crate) fn fence_batch(&self, shared: &Shared, named: Option<u32>) {
        if !shared.shares() || !lock(&self.central).fence_due() {
            return;
        }
        if let Some(_guard) = self.query_guard() {
            self.fence(shared, named);
        }
    }

    /// As [`Device::wait_for_others`], where the alternative is out of memory; and the central lock
    /// under which the run was found.
    pub(crate) fn wait_in_need<'a>(
        &'a self,
        shared: &Shared,
        request: &Request,
        want: Want,
    ) -> Option<(MutexGuard<'a, Central>, RunId)> {
        if shared.settings.waits == Waits::Off {
            return None;
        }
        let mut central = lock(&self.central);
        let completed = |stream| self.streams.completed(stream);
        let growth = Growth {
            completed: &completed,
            fresh: 0,
            steal: shared.shares(),
            lean: false,
            ..Growth::of(shared, &self.streams, request.lifetime)
        };
        let run = self.wait_for_others(shared, &mut central, &growth, want, false)?;
        Some((central, run))
    }

    /// Forgets what was known of streams whose numbers will be others'.
    pub(crate) fn forget_order(&self, numbers: &[u32]) {
        lock(&self.central).order.forget(numbers);
    }
}

impl Heap {
    /// The loader knows that no wait of one stream for another can close a cycle in this process:
    /// it is alone, and nothing that it enqueues waits for what comes later
    /// ([`crate::order::waits`]). From now on `waits:auto` is `waits:budget`, unless it was
    /// forbidden before.
    pub fn allow_waits(&self) {
        if self.shared.permission.allow() && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: a stream waits for another, on the device, where the process would \
                 else hold more than its live blocks have needed and the slack: the process is \
                 alone, on one device"
            );
        }
    }

    /// From now on `waits:auto` is `waits:oom`, for good; `why` is for the log. To be called before
    /// the work that may wait for what comes later is enqueued, with no lock of a device's held:
    /// when it returns, no request of another thread is on its way to add a wait.
    pub fn forbid_waits(&self, why: &str) {
        let is_news = self.shared.permission.forbid();
        // Who has seen the permission holds this lock until its waits are added.
        self.devices().for_each(|device| drop(lock(&device.central)));
        if is_news && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: streams wait for each other only where the alternative is out of \
                 memory: {why}"
            );
        }
    }
}

/// Events are recorded once blocks of one part in this of what is held have begun to wait for them.
const BATCH_SHARE: u64 = 32;

impl Device {
    /// Makes use of what the streams are known to be past by now; asks nobody.
    pub(crate) fn collect_completed(&self, shared: &Shared, central: &mut Central) {
        central.complete_frees(&self.streams, shared.shares());
        if shared.shares() {
            central.promote(&self.streams);
        }
    }
}

impl Central {
    /// Frees the large blocks whose waits are over, and notes whose free memory may be everybody's
    /// by now.
    pub(crate) fn complete_frees(&mut self, streams: &Streams, shares: bool) {
        streams.take_further().for_each(|stream| self.arenas.note_further(stream));
        if !self.pending.is_due(streams.strides()) {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.complete_where(|free| {
            let is_over = free.is_over(|stream| streams.completed(stream));
            if is_over {
                // All streams together have no work of their own that it could lie behind: what it
                // waited for was all there is.
                let owner =
                    if free.own.0 == ALL_STREAMS && shares { (UNOWNED, 0) } else { free.own };
                self.release_pending(free.block, owner);
            }
            is_over
        });
        self.pending = pending;
    }

    fn release_pending(&mut self, id: RunId, (owner, epoch): Wait) {
        let Some(run) = self.arenas.run(id) else { return };
        let Run { bytes, lifetime, slot, .. } = *run;
        let requested = run.requested();
        self.writers[pool_of(bytes)].block_remove(slot, bytes, requested, lifetime, true);
        self.usage.block_given(bytes);
        self.arenas.release(id, owner, epoch);
    }

    /// Frees the large blocks that wait only for what is ordered before the work to come of the
    /// requesting stream, to that stream: those in the ordinary spaces, from which pages can move
    /// to where they are wanted, and in the space in which they are.
    pub(crate) fn complete_ordered_frees(&mut self, streams: &Streams, want: Want) {
        let waiter = want.stream;
        let mut pending = std::mem::take(&mut self.pending);
        pending.complete_where(|free| {
            let Some(run) = self.arenas.run(free.block) else { return false };
            let space = self.arenas.region(run.region).space;
            let is_before = |wait| self.order.is_before(streams, waiter, wait);
            let is_wanted = space == want.space || self.spaces.is_ordinary(space);
            let is_over = is_wanted && free.is_ordered(is_before);
            if is_over {
                self.release_pending(free.block, (waiter, streams.note_free(waiter)));
            }
            is_over
        });
        self.pending = pending;
    }

    /// Whether anything that is free or waits would be ordered by a wait for `epoch` of `stream`.
    pub(crate) fn would_gain(&self, stream: u32, epoch: u64) -> bool {
        self.pending.any_behind(stream, epoch)
            || self.spaces.iter().any(|space| self.arenas.has_freed(space, stream, epoch))
    }

    /// The waits each of which, alone, would bring a run for `want`: for the last work on a free
    /// run that is long enough, or for the one stream that a freed block of that length still waits
    /// for. By stream, the earliest epoch.
    pub(crate) fn single_waits(&self, streams: &Streams, want: Want) -> HashMap<u32, u64> {
        let is_before = |wait: &Wait| self.order.is_before(streams, want.stream, *wait);
        let of_free = self
            .arenas
            .fitting(want.space, want.bytes, want.align)
            .filter_map(|id| self.arenas.run(id))
            .map(|run| (run.stream, run.epoch))
            .filter(|wait| !is_before(wait));
        let of_pending = self.pending.frees().filter_map(|free| {
            let run = self.arenas.run(free.block)?;
            let fits = run.bytes >= want.bytes + run.askew(want.align)
                && self.arenas.region(run.region).space == want.space;
            fits.then(|| free.only_wait(is_before)).flatten()
        });
        let mut earliest = HashMap::new();
        for (stream, epoch) in of_free.chain(of_pending) {
            let known = earliest.entry(stream).or_insert(epoch);
            *known = epoch.min(*known);
        }
        earliest
    }

    /// A run for `want` from one free run whose last work is ordered before the work to come of its
    /// stream.
    pub(crate) fn fit_ordered(&mut self, streams: &Streams, want: Want) -> Option<RunId> {
        let run = want.fit_or_join(&mut self.arenas);
        if run.is_some() {
            return run;
        }
        let order = &self.order;
        let is_ordered = |stream: u32, epoch: u64| order.of(want.stream, stream) >= epoch;
        let id = self.arenas.best_fit_ordered(want.space, want.bytes, want.align, &is_ordered)?;
        self.arenas.hand_over(id, want.stream, streams.note_free(want.stream));
        want.fit(&mut self.arenas)
    }

    /// Makes unowned what its streams are past, in all pools whose memory every stream may get.
    pub(crate) fn promote(&mut self, streams: &Streams) {
        self.arenas.promote_ripe(self.pools.shared_spaces(), &|stream| streams.completed(stream));
    }

    /// As [`Central::promote`], of all that is free; `completed` tells the last epoch that a stream
    /// is past.
    pub(crate) fn promote_to(&mut self, completed: &dyn Fn(u32) -> u64) {
        for space in self.pools.shared_spaces() {
            self.arenas.promote(space, completed);
        }
    }

    /// Whether so much has begun to wait for streams that events are due behind it: one part in
    /// [`BATCH_SHARE`] of what is held. True once.
    pub(crate) fn fence_due(&mut self) -> bool {
        let due = self.unfenced_bytes > self.backing.held / BATCH_SHARE;
        if due {
            self.unfenced_bytes = 0;
        }
        due
    }

    /// Bytes of large blocks that wait for other streams.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.blocks().filter_map(|&id| self.arenas.run(id)).map(|run| run.bytes).sum()
    }
}

/// Why a device was not synchronised.
pub(crate) enum Unsynchronized {
    /// Something captures, or may: synchronising would break the capture.
    Capturing,
    /// The driver refused, or could not say whether anything captures.
    Refused(DriverError),
}

impl Device {
    /// The last epoch of `stream` past which every stream may have its memory. 0 where
    /// record_stream does not reach the allocator: an event does not stand for all uses then.
    pub(crate) fn completed_for_all(&self, shared: &Shared, stream: u32) -> u64 {
        if shared.shares() { self.streams.completed(stream) } else { 0 }
    }

    /// Whether streams may wait for each other to hold less. A stream that is alone has nothing to
    /// wait for.
    pub(crate) fn may_wait_to_hold_less(&self, shared: &Shared) -> bool {
        shared.waits_to_hold_less() && self.streams.count() > 1
    }

    /// Whether one stream may have what another has freed, and there are others.
    pub(crate) fn passes_memory(&self, shared: &Shared) -> bool {
        shared.shares() && self.streams.count() > 1
    }
}

impl Device {
    /// Rung 0. Costs nothing where there is nothing to learn: a program of one stream never records
    /// an event.
    pub(crate) fn look_again(
        &self,
        shared: &Shared,
        central: &mut Central,
        want: Want,
    ) -> Option<RunId> {
        let driver = &*shared.driver;
        let others = || shared.shares() && central.arenas.others_own(want.space, want.stream);
        if (!central.pending.is_empty() || others())
            && let Some(_guard) = self.query_guard()
        {
            for step in 0..2 {
                // First what is recorded already; then what has no event yet.
                if step == 1 && !self.fence(shared, Some(want.stream)) {
                    break;
                }
                self.streams.poll_some(driver);
                self.collect_completed(shared, central);
                if let Some(run) = want.fit(&mut central.arenas) {
                    return Some(run);
                }
            }
        }
        if let Some(run) = self.allocate_ordered(shared, central, want) {
            return Some(run);
        }
        // Neighbours of one owner are merged already: there is nothing to join where only one has
        // any.
        let unowned = central.arenas.own_free_bytes(want.space, UNOWNED);
        let own = central.arenas.own_free_bytes(want.space, want.stream);
        if own == 0 || unowned == 0 || own + unowned < want.bytes {
            return None;
        }
        central.arenas.join(want.space, want.bytes, want.align, want.stream)
    }

    /// Synchronises the device and makes everything that is freed available. False, and nothing
    /// done: a capture is open, or the driver refused.
    pub(crate) fn synchronize(&self, shared: &Shared) -> bool {
        self.synchronize_epochs(shared).is_ok()
    }

    /// As [`Device::synchronize`]; answers the epoch that each stream is past for certain.
    pub(crate) fn synchronize_epochs(
        &self,
        shared: &Shared,
    ) -> Result<HashMap<u32, u64>, Unsynchronized> {
        let driver = &*shared.driver;
        let _guard = self.query_guard().ok_or(Unsynchronized::Capturing)?;
        // Captures that nobody announced must not be broken either.
        if self.streams.capturing(driver).map_err(Unsynchronized::Refused)? {
            return Err(Unsynchronized::Capturing);
        }
        let epochs = self.streams.open_epochs();
        let over = lock(&self.central).captures_over();
        let mut refused = Ok(());
        self.host_wait(shared, || {
            refused = driver.device_synchronize(self.id);
            refused.is_ok()
        });
        refused.map_err(Unsynchronized::Refused)?;
        self.streams.passed(&epochs);
        self.streams.poll(driver);
        self.return_empty_slabs(shared);
        let mut central = lock(&self.central);
        central.usage.synchronised();
        self.collect_completed(shared, &mut central);
        for (pool, version) in over {
            self.free_graph_pool(shared, &mut central, pool, version);
        }
        if !shared.shares() {
            // Streams keep to themselves what they used, but an empty region is the device's again.
            let completed = |stream| self.streams.completed(stream);
            let eviction =
                Eviction { completed: &completed, ..Eviction::of(shared, &self.streams) };
            self.supply.evict(&mut central, &eviction);
        }
        drop(central);
        Ok(epochs)
    }

    pub(crate) fn host_wait(&self, shared: &Shared, wait: impl FnOnce() -> bool) -> bool {
        let start = Instant::now();
        let range = profiler::range(What::HostWait, 0);
        let done = wait();
        drop(range);
        if done {
            let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let mut central = lock(&self.central);
            central.gauges.add(DeviceGauge::HostWaits, 1);
            central.gauges.add(DeviceGauge::HostWaitNanoseconds, nanoseconds);
            drop(central);
            shared.record.event(EventKind::Wait, self.id as u8, 0, 0, 0, nanoseconds, clock::now());
        }
        done
    }
}
