//! The ladder that a request climbs when nothing free fits: look again, grow, reclaim.
//!
//! | step | what it does |
//! |---|---|
//! | rung 0 | asks the recorded events, records new ones behind frees that have none, joins neighbours |
//! | before growth | past the slack, returns empty slabs; where only a synchronisation shows that parked memory is free (before CUDA 12.5), synchronises rather than grow for nothing |
//! | growth | a span, or pages ([`Device::grow`]); after each rung again |
//! | rung 1 | returns the empty slabs of all shards to the arenas |
//! | rung 2 | gives empty regions back and trims the driver's pools |
//! | rung 3 | makes the stream wait for other streams' events (`waits:`); else the host waits for the oldest unfinished event, again and again |
//! | rung 4 | synchronises the device once |
//! | rung 5 | gives up the reserves of lifetimes, and grows into the headroom, which stays open until memory is given back (a trim, a low-memory phase) |
//! | last | takes a place among blocks of other sizes and lifetimes |
//!
//! Each rung counts the bytes it gave and the time it took on the host ([`crate::report::rungs`]).
//! While a capture is open on the device, the allocator neither asks, records nor awaits events and
//! never synchronises: only rungs 1, 2 and 5 remain (of rung 2 only the pools, since cuMemFree
//! waits for the device).

use crate::central::Central;
use crate::device::Device;
use crate::driver::DriverError;
use crate::error::Error;
use crate::profiler::{self, What};
use crate::report::rungs::Stopwatch;
use crate::request::{Eviction, Growth, Request, Want};
use crate::runs::arena::{RunId, SpaceId};
use crate::shared::Shared;
use crate::small::size_class::round;
use crate::sync::{MutexGuard, lock};
use crate::upkeep::alerts::AlertKind;
use gruyere_record::EventKind;
use gruyere_record::device_gauge::{DeviceGauge, RUNGS};
use std::time::{Duration, Instant};

/// How far growth may go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Budget,
    /// All that the ceiling allows.
    Ceiling,
}

impl Device {
    /// A live run of `bytes` at a multiple of `align` for `request`, in `space` or the space of its
    /// lifetime, and the central lock under which it was found.
    ///
    /// # Errors
    /// As [`Device::climb`].
    pub(crate) fn allocate_run<'a>(
        &'a self,
        shared: &Shared,
        request: Request,
        space: Option<SpaceId>,
        bytes: u64,
        align: u64,
    ) -> Result<(MutexGuard<'a, Central>, RunId), Error> {
        let mut central = lock(&self.central);
        let space =
            space.unwrap_or_else(|| central.spaces.of_size(request.lifetime, round(request.size)));
        let want = Want { space, bytes, align, stream: request.stream };
        match want.fit(&mut central.arenas) {
            Some(run) => Ok((central, run)),
            None => self.climb(shared, central, request, want),
        }
    }

    /// As [`Device::allocate_run`] where nothing free fits: climbs the ladder.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after the whole ladder; the driver's error, if the driver failed
    /// otherwise.
    pub(crate) fn climb<'a>(
        &'a self,
        shared: &Shared,
        mut central: MutexGuard<'a, Central>,
        request: Request,
        want: Want,
    ) -> Result<(MutexGuard<'a, Central>, RunId), Error> {
        let before = central.ladder.clone();
        let looking = Instant::now();
        let run = self.look_again(shared, &mut central, want);
        let given = if run.is_some() { want.bytes } else { 0 };
        central.count_rung(0, given, looking.elapsed());
        if let Some(run) = run {
            return Ok((central, run));
        }
        if self.supply.prefers_idle(&central, shared.record, want.bytes) {
            // A bin keeps an empty slab for its next block; this request has a better use for it.
            drop(central);
            let bytes = self.return_empty_slabs(shared);
            central = lock(&self.central);
            if bytes > 0
                && let Some(run) = want.fit_or_join(&mut central.arenas)
            {
                return Ok((central, run));
            }
        }
        if self.streams.needs_synchronisation(shared.hears_of_captures())
            && central.would_grow_for_nothing(shared.record, want.bytes)
        {
            // Classic cudaFree waits for the device at each call; here one wait serves all parked
            // memory.
            drop(central);
            self.synchronize(shared);
            central = lock(&self.central);
            if let Some(run) = want.fit_or_join(&mut central.arenas) {
                return Ok((central, run));
            }
        }
        // A local of this climb: another thread that climbs at the same time has its own.
        let mut failure = None;
        match self.grow(shared, &mut central, &request, want, Room::Budget) {
            Ok(Some(run)) => return Ok((central, run)),
            Ok(None) => {}
            Err(error) if error.is_final() => return Err(error.into()),
            Err(error) => failure = Some(error),
        }
        central.retries += 1;
        let retries = central.retries;
        central.gauges.set(&[(DeviceGauge::Retries, retries)]);
        let reserved = central.backing.reserved;
        drop(central);
        self.alert(shared, AlertKind::Reclaim, request.size, reserved, retries);
        match self.reclaim(shared, &request, want, &mut failure) {
            Some(found) => Ok(found),
            None => Err(match self.refusal(shared, &request, failure) {
                Error::OutOfMemory(mut report) => {
                    report.this_time = Some(report.ladder.since(&before));
                    Error::OutOfMemory(report)
                }
                other => other,
            }),
        }
    }

    /// Grows, or makes better use of the memory held: idle pages move, or, if more would be held
    /// than the slack allows, the stream first waits for others.
    ///
    /// # Errors
    /// The driver's error, other than out of memory.
    fn grow(
        &self,
        shared: &Shared,
        central: &mut Central,
        request: &Request,
        want: Want,
        room: Room,
    ) -> Result<Option<RunId>, DriverError> {
        let completed = |stream| self.completed_for_all(shared, stream);
        let fresh = if room == Room::Budget { self.budget(shared, central) } else { u64::MAX };
        // Unmapping may wait for the device, and pages move only where streams share memory.
        let moves = self.supply.moves_pages() && shared.shares();
        let guard = if moves { self.release_guard(shared) } else { None };
        if guard.is_some() {
            // Old mappings kept for debugging go when memory is given back.
            let kept = self.supply.unmaps_before_growth(central);
            let kept = kept.filter(|_| !shared.settings.debug.mapped);
            if kept.is_some() || self.supply.prefers_idle(central, shared.record, want.bytes) {
                self.fence(shared, Some(want.stream));
                self.streams.poll_some(&*shared.driver);
            }
            if let Some(kept) = kept {
                central.unmap_retired(&*shared.driver, &completed, kept);
            }
        }
        let little_left = central.has_little_left(fresh);
        let growth = Growth {
            completed: &completed,
            fresh,
            little_left,
            any_time: little_left,
            moves: guard.is_some(),
            ..Growth::of(shared, &self.streams, request.lifetime)
        };
        let waits = room == Room::Budget
            && self.may_wait_to_hold_less(shared)
            && self.supply.prefers_idle(central, shared.record, want.bytes);
        let first = Growth { past_slack: !waits, ..growth };
        if waits && let Some(run) = self.wait_for_others(shared, central, &first, want, true) {
            return Ok(Some(run));
        }
        let may_release = || self.release_guard(shared);
        let mut grown = self.supply.grow(central, &first, want, &may_release);
        if waits && matches!(grown, Ok(None)) {
            grown = self.supply.grow(central, &growth, want, &may_release);
        }
        grown.inspect_err(|error| {
            log::debug!("device {}: growing by {} B failed: {error}", self.id, want.bytes);
            self.event(shared, EventKind::DriverError, 0, u64::from(error.code));
        })
    }

    /// Fresh memory that still leaves the device its headroom.
    pub(crate) fn budget(&self, shared: &Shared, central: &mut Central) -> u64 {
        let headroom = if central.headroom_is_open { 0 } else { self.headroom(shared) };
        self.free_beside(shared, central, headroom)
    }

    /// The memory that the configuration leaves free for other processes.
    pub(crate) fn headroom(&self, shared: &Shared) -> u64 {
        shared.settings.headroom.resolve(self.capabilities.total_memory)
    }

    /// Fresh memory that still leaves the device `headroom` bytes.
    pub(crate) fn free_beside(&self, shared: &Shared, central: &mut Central, headroom: u64) -> u64 {
        central.backing.calls += 1;
        // If the driver cannot say, growth itself finds out.
        shared
            .driver
            .memory_info(self.id)
            .map_or(u64::MAX, |info| info.free.saturating_sub(headroom))
    }

    /// Climbs the rungs above growth. `failure`: the driver's error in the latest growth that
    /// failed.
    fn reclaim<'a>(
        &'a self,
        shared: &Shared,
        request: &Request,
        want: Want,
        failure: &mut Option<DriverError>,
    ) -> Option<(MutexGuard<'a, Central>, RunId)> {
        let _range = profiler::range(What::Reclaim, want.bytes);
        let driver = &*shared.driver;
        let mut stopwatch = Stopwatch::start();
        let mut retry = |room: Room, rung: usize, bytes: u64| {
            let mut central = lock(&self.central);
            let run = want
                .fit(&mut central.arenas)
                .or_else(|| self.look_again(shared, &mut central, want))
                .or_else(|| {
                    let grown = self.grow(shared, &mut central, request, want, room);
                    grown.unwrap_or_else(|error| {
                        *failure = Some(error);
                        None
                    })
                });
            central.count_rung(rung, bytes, stopwatch.lap());
            run.map(|run| (central, run))
        };
        let release = || {
            let mut central = lock(&self.central);
            let Some(_guard) = self.release_guard(shared) else { return 0 };
            let bytes = self.supply.evict(&mut central, &Eviction::of(shared, &self.streams));
            self.supply.release(&mut central, driver);
            central.publish_reserved();
            central.gauges.add(DeviceGauge::Trims, 1);
            bytes
        };
        let slabs = self.return_empty_slabs(shared);
        if let Some(found) = retry(Room::Budget, 1, slabs) {
            return Some(found);
        }
        // A stream may still own the memory of those slabs: it becomes unowned if that stream's
        // work on it is done.
        if let Some(_guard) = self.query_guard() {
            self.streams.poll(driver);
        }
        self.collect_completed(shared, &mut lock(&self.central));
        if let Some(found) = retry(Room::Budget, 2, release()) {
            return Some(found);
        }
        let waits = self.query_guard().is_some_and(|_guard| {
            let quiet = !self.streams.any_capturing(driver);
            if quiet {
                self.fence_all(shared, Some(want.stream));
            }
            quiet
        });
        if waits {
            let mut waiting = Stopwatch::start();
            if let Some((mut central, run)) = self.wait_in_need(shared, request, want) {
                central.count_rung(3, want.bytes, waiting.lap());
                return Some((central, run));
            }
            while self
                .query_guard()
                .is_some_and(|_| self.host_wait(shared, || self.streams.wait_for_oldest(driver)))
            {
                self.collect_completed(shared, &mut lock(&self.central));
                self.return_empty_slabs(shared);
                if let Some(found) = retry(Room::Budget, 3, release()) {
                    return Some(found);
                }
            }
            self.synchronize(shared);
            if let Some(found) = retry(Room::Budget, 4, release()) {
                return Some(found);
            }
        }
        let found = retry(Room::Ceiling, 5, self.give_up_reserves(shared));
        let (mut central, run) = found.or_else(|| self.fit_elsewhere(want))?;
        // Beside a capture the ladder skipped its waits: then only this request uses the headroom.
        let may_open = waits && !central.headroom_is_open;
        if may_open && self.free_beside(shared, &mut central, self.headroom(shared)) == 0 {
            // If the headroom stayed closed, each later request would climb the whole ladder, and
            // would split idle pages that the request after it could have had whole.
            central.headroom_is_open = true;
            log::info!(
                "device {}: memory is short, so the headroom is used until memory is released",
                self.id
            );
        }
        Some((central, run))
    }

    /// A run among blocks of other sizes and lifetimes.
    fn fit_elsewhere(&self, want: Want) -> Option<(MutexGuard<'_, Central>, RunId)> {
        let mut central = lock(&self.central);
        if !central.spaces.is_ordinary(want.space) {
            return None;
        }
        let run = central
            .spaces
            .iter()
            .find_map(|space| Want { space, ..want }.fit_or_join(&mut central.arenas))?;
        Some((central, run))
    }

    /// The error for a request that cannot be served: `failure` of the driver, else out of memory.
    /// A program that halves its batch on out of memory must not do so for ever on a lost device.
    #[cold]
    pub(crate) fn refusal(
        &self,
        shared: &Shared,
        request: &Request,
        failure: Option<DriverError>,
    ) -> Error {
        match failure {
            Some(error) => error.into(),
            None => self.out_of_memory(shared, request.size, request.stream),
        }
    }
}

impl Central {
    /// Counts one turn on a rung, here and in the record.
    pub(crate) fn count_rung(&mut self, number: usize, bytes: u64, elapsed: Duration) {
        let rung = &mut self.ladder.rungs[number];
        rung.calls += 1;
        rung.bytes += bytes;
        rung.nanoseconds += u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let [calls, gained, microseconds] = RUNGS[number].gauges();
        let values =
            [(calls, rung.calls), (gained, rung.bytes), (microseconds, rung.nanoseconds / 1000)];
        self.gauges.set(&values);
    }
}
