//! Waits that the program did not ask for: one stream waits on the device for another, to have memory that the other has freed.
//!
//! An event stands behind the frees of an epoch ([`super::streams`]). Once the asking stream has been made to wait for it, whatever that stream is given to
//! do comes after those frees: they are ordered before it, though nobody knows yet that they are done. So the asking stream may have
//! that memory at once, and nobody else may. The host never stands still for it.
//!
//! Waits are cheap, moving pages is not: beyond the slack the stream waits for all that brings it memory, until one free run is long enough, and only then do pages
//! move. What is ordered before a stream's work to come without any wait, it has first, whatever `waits:` says ([`Device::take_ordered`]).
//!
//! In rare programs such a wait closes a cycle across ranks (tests/heap_waits.rs shows one), hence `waits:off|oom|budget`.
#![deny(unsafe_code)]

use super::arena::RunId;
use super::backing::Kind;
use super::central::{Central, Growth, Want};
use super::device::{Device, Request};
use super::number_set::NumberSet;
use super::shared::Shared;
use super::streams::EVERY;
use super::sync::{MutexGuard, lock};
use crate::config::Waits;
use crate::nvtx;
use crate::record::{EventKind, clock};
use std::collections::HashMap;

/// What streams have been made to wait for.
#[derive(Default)]
pub struct Order {
    /// By (waiter, stream): the last epoch of `stream` that is ordered before the waiter's work to come.
    epochs: HashMap<(u32, u32), u64>,
}

impl Order {
    /// The last epoch of `stream` that the work to come of `waiter` comes after, as far as waits of ours tell.
    pub fn of(&self, waiter: u32, stream: u32) -> u64 {
        if waiter == stream && stream != EVERY {
            u64::MAX
        } else {
            self.epochs.get(&(waiter, stream)).copied().unwrap_or(0)
        }
    }

    fn add(&mut self, waiter: u32, stream: u32, epoch: u64) {
        let known = self.epochs.entry((waiter, stream)).or_default();
        *known = epoch.max(*known);
    }

    /// Whether no stream has been made to wait.
    pub fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    /// Forgets streams whose numbers will be others'.
    pub fn forget(&mut self, numbers: &[u32]) {
        let mut gone = NumberSet::default();
        numbers.iter().for_each(|&number| gone.insert(number));
        self.epochs.retain(|&(waiter, stream), _| !gone.contains(waiter) && !gone.contains(stream));
    }
}

impl Device {
    /// A run for `want` from memory whose last work comes before whatever its stream is given to do from now on, though nobody knows yet that it is
    /// done: blocks that wait only for that stream itself, and what it has been made to wait for.
    pub(super) fn take_ordered(&self, shared: &Shared, central: &mut Central, want: Want) -> Option<RunId> {
        let some = central.has_pending() || !central.order.is_empty();
        let _asking = if some && shared.shares() { self.ask()? } else { return None };
        central.settle_ordered(&self.streams, want);
        central.fit_ordered(&self.streams, want)
    }

    /// A run for `want` from memory that other streams have freed: its stream waits for their events, the oldest first, until it has one.
    /// Makes pages move too, where they can and that is not enough. `None`: nothing of the kind helps, or a capture is open.
    pub(super) fn wait_for_others(
        &self,
        shared: &Shared,
        central: &mut Central,
        growth: &Growth<'_>,
        want: Want,
    ) -> Option<RunId> {
        let _asking = self.ask()?;
        let driver = &*shared.driver;
        if !shared.shares() {
            return None;
        }
        self.seal_all(shared, Some(want.stream));
        for (stream, epoch) in self.streams.unfinished() {
            if central.order.of(want.stream, stream) >= epoch || !central.would_gain(stream, epoch) {
                continue;
            }
            if !self.streams.make_wait(driver, want.stream, stream, epoch) {
                continue;
            }
            central.order.add(want.stream, stream, epoch);
            nvtx::mark(nvtx::What::StreamWait, want.bytes);
            shared.record.event(EventKind::Wait, self.id as u8, 0, want.stream, 0, 0, clock::now());
            central.settle_ordered(&self.streams, want);
            if let Some(run) = central.fit_ordered(&self.streams, want) {
                return Some(run);
            }
        }
        if self.kind == Kind::Stitch && central.extend(&Growth { fresh: 0, ..*growth }, want, false).is_ok() {
            return want.fit_or_join(central);
        }
        None
    }

    /// Records events behind the frees so far, once many blocks have begun to wait for streams ([`Central::take_batch`]): late events come behind work that has nothing to do
    /// with the frees, and a program whose memory waits for them takes fresh memory meanwhile. `named`: the stream that this call names.
    pub(super) fn seal_batch(&self, shared: &Shared, named: Option<u32>) {
        if !shared.shares() || !lock(&self.central).take_batch() {
            return;
        }
        if let Some(_asking) = self.ask() {
            self.seal(shared, named);
        }
    }

    /// As [`Device::wait_for_others`], where the alternative is out of memory; and the central lock under which the run was found.
    pub(super) fn wait_in_need<'a>(
        &'a self,
        shared: &Shared,
        request: &Request,
        want: Want,
    ) -> Option<(MutexGuard<'a, Central>, RunId)> {
        if shared.config.waits == Waits::Off {
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
        let run = self.wait_for_others(shared, &mut central, &growth, want)?;
        Some((central, run))
    }

    /// Forgets what was known of streams whose numbers will be others'.
    pub(super) fn forget_order(&self, numbers: &[u32]) {
        lock(&self.central).order.forget(numbers);
    }
}
