//! Streams are made to wait for each other.

use crate::central::Central;
use crate::device::Device;
use crate::order::streams::Unfinished;
use crate::profiler::{self, What};
use crate::request::{Growth, Request, Want};
use crate::runs::arena::RunId;
use crate::settings::Waits;
use crate::shared::Shared;
use crate::sync::{MutexGuard, lock};
use gruyere_record::{EventKind, clock};

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
