//! The rule of stream order, in one place: which stream may reuse freed memory, and when.
//!
//! | freed memory | streams that may reuse it |
//! |---|---|
//! | free, owned by a stream | that stream, at once |
//! | free, and `Streams::reusable` | every stream, if streams share |
//! | free or pending, ordered before a stream's future work (`Order`) | that stream |
//! | pending: other streams used it | its own stream, once each user is past its use |
//!
//! A request applies the rule in steps, cheapest first: it uses what is known
//! ([`Device::collect_completed`]), asks recorded events and records new ones
//! ([`Device::look_again`]), and waits for other streams ([`Device::wait_for_others`]).
//! [`Device::synchronize`] makes everything freed available.

use crate::central::Central;
use crate::device::Device;
use crate::heap::Heap;
use crate::order::pending::{Wait, Work};
use crate::order::streams::{ALL_STREAMS, Streams, Unfinished};
use crate::profiler::{self, What};
use crate::request::{Growth, Request, Want};
use crate::runs::arena::{Run, RunId, UNOWNED};
use crate::settings::Waits;
use crate::shared::Shared;
use crate::sync::{MutexGuard, lock};
use gruyere_record::gauges::pool_of;
use gruyere_record::{EventKind, clock};
use std::collections::HashMap;

/// Events are due once large blocks of one part in this of the memory held have been freed.
const BATCH_SHARE: u64 = 64;
/// To have a run by a single event, streams may be expected to stand idle, beyond what other work
/// covers, for this long in all ([`Streams::host_clock`]),
const FIRST_IDLE: u64 = 8;
/// and for one part in this of the clock.
const IDLE_SHARE: u64 = 8;

impl Device {
    /// A run for `want` from memory whose last work is ordered before its stream's future work,
    /// though perhaps not done yet: blocks that wait only for that stream itself, and memory of
    /// streams that it already waits for.
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

    /// A run for `want` from memory that other streams freed: its stream waits for one event that
    /// alone yields a run, of several for the one with the least work before it. If no single event
    /// does, it waits for those for which it need not stand idle (`near`), or all, until it has a
    /// run; where that is not enough and pages can move, they move. `None`: nothing of this helps,
    /// or a capture is open.
    ///
    /// With `near`, it stands idle for a single event only as long as other work covers that, or
    /// within [`FIRST_IDLE`] and [`IDLE_SHARE`]; and for an event behind all work of the device,
    /// which may keep it waiting for streams that have nothing to do with the run, only if no
    /// stream but that of the run has work before it.
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
        let gains = |stream, work| central.wait_would_gain(want.stream, stream, work);
        let events =
            self.streams.unfinished(want.stream, central.order.latest_wait(want.stream), gains);
        let waits = central.single_waits(&self.streams, want);
        let is_by = |stream, of_own, epoch| {
            waits.get(&(stream, of_own)).is_some_and(|&needed| needed <= epoch)
        };
        let may_idle = FIRST_IDLE + self.streams.host_clock() / IDLE_SHARE;
        let is_short = |event: &Unfinished| {
            event.uncovered == 0 || central.idled + event.uncovered <= may_idle
        };
        let is_enough = |event: &&Unfinished| {
            event.all_work().any(|(stream, work)| {
                let is_alone = || event.busy.iter().all(|&busy| busy == stream);
                (is_by(stream, true, work.ripe) || is_by(stream, false, work.epoch))
                    && (event.is_near() || !near || is_short(event) && is_alone())
            })
        };
        let enough = events.iter().find(is_enough);
        let all = events.iter().filter(|event| event.is_near() || !near);
        for event in enough.into_iter().chain(all) {
            if self.wait_for(shared, central, want, event) {
                // Where the alternative is out of memory, idle time does not count.
                central.idled += if near { event.uncovered } else { 0 };
                central.complete_ordered_frees(&self.streams, want);
                if let Some(run) = central.fit_ordered(&self.streams, want) {
                    return Some(run);
                }
            }
        }
        let has_room = self.supply.make_room(central, growth, want);
        has_room.then(|| want.fit_or_join(&mut central.arenas)).flatten()
    }

    /// Makes the stream of `want` wait for an event if that yields memory. True: it waits.
    fn wait_for(
        &self,
        shared: &Shared,
        central: &mut Central,
        want: Want,
        event: &Unfinished,
    ) -> bool {
        let would_gain = |(stream, work)| central.wait_would_gain(want.stream, stream, work);
        let Unfinished { stream, work, .. } = *event;
        if !event.all_work().any(would_gain)
            || !self.streams.make_wait(&*shared.driver, want.stream, stream, work.epoch)
        {
            return false;
        }
        for (stream, work) in event.all_work() {
            central.order.add(want.stream, stream, work);
        }
        central.order.note_wait(want.stream, stream, event.clock);
        profiler::mark(What::StreamWait, want.bytes);
        shared.record.event(EventKind::Wait, self.id as u8, 0, want.stream, 0, 0, clock::now());
        true
    }

    /// Records events behind the frees so far, where streams pass memory to each other. An event
    /// that is recorded late also covers work that has nothing to do with the frees, and until that
    /// is done the program takes fresh memory. `named`: the stream that this call names (a free of
    /// torch's names none); other passing streams get their event in their next call.
    #[cold]
    #[inline(never)]
    pub(crate) fn fence_batch(
        &self,
        shared: &Shared,
        mut central: MutexGuard<'_, Central>,
        named: Option<u32>,
    ) {
        central.fence_at = central.freed + central.backing.held / BATCH_SHARE;
        drop(central);
        let passes = self.passes_memory(shared) || named.is_some() && shared.shares();
        let Some(_guard) = passes.then(|| self.query_guard()).flatten() else { return };
        if named.is_some() {
            self.fence(shared, named);
        } else {
            self.streams.fence_each(&*shared.driver, None);
        }
    }

    /// As [`Device::wait_for_others`], as the last step before out of memory. Also returns the
    /// central lock under which it found the run.
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
        let completed = |stream| self.streams.reusable(stream);
        let growth = Growth {
            completed: &completed,
            fresh: 0,
            any_time: true,
            moves: shared.shares(),
            past_slack: false,
            ..Growth::of(shared, &self.streams, request.lifetime)
        };
        let run = self.wait_for_others(shared, &mut central, &growth, want, false)?;
        Some((central, run))
    }

    /// Applies what the streams are already known to be past. Calls no driver.
    pub(crate) fn collect_completed(&self, shared: &Shared, central: &mut Central) {
        central.complete_frees(&self.streams, shared.shares());
        if shared.shares() {
            central.promote(&self.streams);
        }
    }

    /// The last epoch of `stream` past which every stream may have its memory. 0 if record_stream
    /// does not reach the allocator: an event then does not cover all uses.
    pub(crate) fn completed_for_all(&self, shared: &Shared, stream: u32) -> u64 {
        if shared.shares() { self.streams.reusable(stream) } else { 0 }
    }

    /// Whether streams may wait for each other to hold less. A single stream has no other to wait
    /// for.
    pub(crate) fn may_wait_to_hold_less(&self, shared: &Shared) -> bool {
        shared.waits_to_hold_less() && self.streams.count() > 1
    }

    /// Whether a stream may get memory that another freed, and there are others.
    pub(crate) fn passes_memory(&self, shared: &Shared) -> bool {
        shared.shares() && self.streams.count() > 1
    }

    /// Rung 0. Free of cost if there is nothing to learn: a program with one stream never records
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
                // First the recorded events, then new events for frees without one.
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
        // Neighbours of one owner are merged already: joining helps only if both have free memory.
        let unowned = central.arenas.own_free_bytes(want.space, UNOWNED);
        let own = central.arenas.own_free_bytes(want.space, want.stream);
        if own == 0 || unowned == 0 || own + unowned < want.bytes {
            return None;
        }
        central.arenas.join(want.space, want.bytes, want.align, want.stream)
    }
}

impl Heap {
    /// The loader asserts that no wait of one stream for another can close a cycle in this process:
    /// it is alone, and nothing that it enqueues waits for later work ([`crate::order::waits`]).
    /// From now on `waits:auto` is `waits:budget`, unless it was forbidden before.
    pub fn allow_waits(&self) {
        if self.shared.permission.allow() && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: a stream waits for another on the device where the process would \
                 otherwise hold more than the peak of its live bytes plus the slack: the process \
                 is alone, on one device"
            );
        }
    }

    /// From now on, and for good, `waits:auto` is `waits:oom`; `why` is for the log. Call before
    /// enqueuing work that may wait for later work, with no device lock held: when it returns, no
    /// request of another thread is about to add a wait.
    pub fn forbid_waits(&self, why: &str) {
        let is_news = self.shared.permission.forbid();
        // A thread that has seen the permission holds this lock until its waits are added.
        self.devices().for_each(|device| drop(lock(&device.central)));
        if is_news && self.shared.settings.waits == Waits::Auto {
            log::info!(
                "waits:auto: streams wait for each other only where the alternative is out of \
                 memory: {why}"
            );
        }
    }
}

impl Central {
    /// Frees the large blocks whose waits are over, and marks streams whose free memory may be
    /// every stream's by now.
    pub(crate) fn complete_frees(&mut self, streams: &Streams, shares: bool) {
        streams.take_further().for_each(|stream| self.arenas.note_further(stream));
        if !self.pending.is_due(streams.strides()) {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.complete_where(|free| {
            let is_over = free.is_over(|stream| streams.completed(stream));
            if is_over {
                // The owner "all streams" has no work of its own left to wait for: those waits were
                // all there was.
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

    /// Frees, to the requesting stream, the large blocks that wait only for work ordered before its
    /// future work: those in the space of `want`, and those in ordinary spaces, from which pages
    /// can move there.
    pub(crate) fn complete_ordered_frees(&mut self, streams: &Streams, want: Want) {
        let waiter = want.stream;
        let mut pending = std::mem::take(&mut self.pending);
        pending.complete_where(|free| {
            let Some(run) = self.arenas.run(free.block) else { return false };
            let space = self.arenas.region(run.region).space;
            let may_reuse = |own| self.order.may_reuse(streams, waiter, own);
            let is_before = |wait| self.order.is_before(streams, waiter, wait);
            let is_wanted = space == want.space || self.spaces.is_ordinary(space);
            let is_over = is_wanted && free.is_ordered(may_reuse, is_before);
            if is_over {
                self.release_pending(free.block, (waiter, streams.note_free(waiter)));
            }
            is_over
        });
        self.pending = pending;
    }

    /// Whether a wait of `waiter` for `work` of `stream` would order any free or pending memory,
    /// which is not ordered yet. If so, one for later work of the stream would too.
    fn wait_would_gain(&self, waiter: u32, stream: u32, work: Work) -> bool {
        !self.order.has(waiter, stream, work) && self.would_gain(stream, work)
    }

    /// Whether a wait for `work` of `stream` would order any free or pending memory.
    pub(crate) fn would_gain(&self, stream: u32, work: Work) -> bool {
        self.pending.any_behind(stream, work)
            || self.spaces.iter().any(|space| self.arenas.has_freed(space, stream, work.ripe))
    }

    /// The waits that would each, alone, yield a run for `want`: for the last work on a free run
    /// that is long enough, or for the one stream that a pending block of that length still waits
    /// for. The earliest epoch by stream, and by whether memory that the stream freed is meant, or
    /// a block that it used.
    pub(crate) fn single_waits(&self, streams: &Streams, want: Want) -> HashMap<(u32, bool), u64> {
        let may_reuse = |own: &Wait| self.order.may_reuse(streams, want.stream, *own);
        let is_before = |wait: &Wait| self.order.is_before(streams, want.stream, *wait);
        let of_free = self
            .arenas
            .fitting(want.space, want.bytes, want.align)
            .filter_map(|id| self.arenas.run(id))
            .map(|run| (run.stream, run.epoch))
            .filter(|own| !may_reuse(own))
            .map(|own| (own, true));
        let of_pending = self.pending.frees().filter_map(|free| {
            let run = self.arenas.run(free.block)?;
            let fits = run.bytes >= want.bytes + run.askew(want.align)
                && self.arenas.region(run.region).space == want.space;
            fits.then(|| free.only_wait(may_reuse, is_before)).flatten()
        });
        let mut earliest = HashMap::new();
        for ((stream, epoch), of_own) in of_free.chain(of_pending) {
            let known = earliest.entry((stream, of_own)).or_insert(epoch);
            *known = epoch.min(*known);
        }
        earliest
    }

    /// A run for `want` from one free run whose last work is ordered before its stream's future
    /// work.
    pub(crate) fn fit_ordered(&mut self, streams: &Streams, want: Want) -> Option<RunId> {
        let run = want.fit_or_join(&mut self.arenas);
        if run.is_some() {
            return run;
        }
        let order = &self.order;
        let is_ordered = |stream: u32, epoch: u64| order.reusable(want.stream, stream) >= epoch;
        let id = self.arenas.best_fit_ordered(want.space, want.bytes, want.align, &is_ordered)?;
        self.arenas.hand_over(id, want.stream, streams.note_free(want.stream));
        want.fit(&mut self.arenas)
    }

    /// Makes free memory unowned once its stream is past its last use, in all pools that streams
    /// share.
    pub(crate) fn promote(&mut self, streams: &Streams) {
        self.arenas.promote_ripe(self.pools.shared_spaces(), &|stream| streams.reusable(stream));
    }

    /// As [`Central::promote`], for all free memory; `completed` returns the last epoch that a
    /// stream is past.
    pub(crate) fn promote_to(&mut self, completed: &dyn Fn(u32) -> u64) {
        for space in self.pools.shared_spaces() {
            self.arenas.promote(space, completed);
        }
    }

    /// Whether enough has been freed since the last events for new ones
    /// ([`Device::fence_batch`]).
    #[inline(always)]
    pub(crate) fn is_batch_freed(&self) -> bool {
        self.freed >= self.fence_at
    }

    /// Bytes of large blocks that wait for other streams.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.blocks().filter_map(|&id| self.arenas.run(id)).map(|run| run.bytes).sum()
    }
}
