//! Spans: what the driver hands to the heap in one piece, from its pools or as plain allocations.
//!
//! Pools: one for each lifetime. A span is allocated and freed on a private stream that runs no
//! kernels, and that stream is synchronised before a span's first use; a span is freed only when
//! the host knows that all its uses are done. So the driver's own rules of reuse never matter.

use crate::driver::{
    DeviceId, Driver, DriverError, ErrorKind, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use crate::journal::Action;
use crate::journal::SegmentLog;
use crate::lifetime::{LIFETIMES, Lifetime};
use crate::settings::{PoolReuse, Settings};
use crate::small::size_class::{PAGE, round_up};
use crate::supply::pages::chunks::Pages;

/// The step in which the driver's pools grow (bytes). Spans are multiples of it where memory is not
/// short.
pub(crate) const SPAN: u64 = 32 << 20;

/// Where a span came from, to give it back there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte that may be used, a multiple of the page.
    pub(crate) address: u64,
    /// Bytes that may be used, a multiple of the page.
    pub(crate) bytes: u64,
    pub(crate) origin: u64,
    /// The driver's bytes.
    pub(crate) taken: u64,
}

/// The driver's pools that a heap takes spans from; each is made with its first span.
struct Pools {
    /// Ours alone: no kernel runs on it.
    stream: Option<StreamHandle>,
    by_lifetime: [Option<PoolHandle>; LIFETIMES],
    /// The most that one may hold (bytes).
    longest: u64,
    /// What they are set to when they are made.
    settings: [(PoolAttribute, u64); 3],
}

/// The driver side of a device's heap.
pub(crate) struct Backing {
    device: DeviceId,
    /// Where spans come from, but for short ones; without, all are plain allocations.
    pools: Option<Pools>,
    peers: Vec<DeviceId>,
    /// Spans that nobody uses and the driver would not take back, (address, bytes): tried again at
    /// every trim.
    orphans: Vec<(u64, u64)>,
    /// The pages of `backing:stitch`.
    pub(crate) pages: Pages,
    /// What came and went in spans and blocks, for the history; pages have a log of their own.
    pub(crate) log: SegmentLog,
    /// Bytes of the spans that are not of the driver's pools, orphans included.
    plain: u64,
    /// Segments that others brought: bytes, and how many.
    outside: (u64, u64),
    /// Bytes of spans or pages held, orphans and what others brought included, as asked of the
    /// driver.
    pub(crate) held: u64,
    /// Physical bytes held, as the driver counts them.
    pub(crate) reserved: u64,
    /// Pieces in which it is held: spans, orphans, blocks of the driver's own; or pages.
    pub(crate) pieces: u64,
    /// Driver calls made for spans.
    pub(crate) calls: u64,
    pub(crate) errors: u64,
}

impl Backing {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self {
            device,
            pools: None,
            peers: Vec::new(),
            orphans: Vec::new(),
            pages: Pages::new(device),
            log: SegmentLog::new(device),
            plain: 0,
            outside: (0, 0),
            held: 0,
            reserved: 0,
            pieces: 0,
            calls: 0,
            errors: 0,
        }
    }

    /// The same, with the driver's pools to take spans from.
    pub(crate) fn with_pools(self, settings: &Settings, total_memory: u64) -> Self {
        let reuse = u64::from(settings.pool_reuse == PoolReuse::On);
        let threshold =
            settings.release_threshold.map_or(u64::MAX, |size| size.resolve(total_memory));
        let pools = Pools {
            stream: None,
            by_lifetime: [None; LIFETIMES],
            longest: total_memory.next_multiple_of(PAGE),
            settings: [
                (PoolAttribute::ReuseAllowOpportunistic, reuse),
                (PoolAttribute::ReuseAllowInternalDependencies, reuse),
                (PoolAttribute::ReleaseThreshold, threshold),
            ],
        };
        Self { pools: Some(pools), ..self }
    }

    /// One more piece is held.
    pub(crate) fn hold(&mut self, bytes: u64) {
        self.held += bytes;
        self.pieces += 1;
    }

    /// One piece is held no more.
    pub(crate) fn unhold(&mut self, bytes: u64) {
        self.held -= bytes;
        self.pieces -= 1;
    }

    /// A segment that others brought is held.
    pub(crate) fn hold_outside(&mut self, address: u64, bytes: u64) {
        self.outside = (self.outside.0 + bytes, self.outside.1 + 1);
        self.hold(bytes);
        self.reserved += bytes;
        self.log.note(Action::SegmentAlloc, address, bytes);
    }

    /// A segment that others brought goes back to them.
    pub(crate) fn unhold_outside(&mut self, address: u64, bytes: u64) {
        self.outside = (self.outside.0 - bytes, self.outside.1 - 1);
        self.unhold(bytes);
        self.reserved -= bytes;
        self.log.note(Action::SegmentFree, address, bytes);
    }

    fn counted<T>(&mut self, result: Result<T>) -> Result<T> {
        self.calls += 1;
        self.errors += u64::from(result.is_err());
        result
    }

    /// A span of at least `bytes` (a multiple of the page), free of all earlier work.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn allocate_span(
        &mut self,
        driver: &dyn Driver,
        lifetime: Lifetime,
        bytes: u64,
    ) -> Result<Span> {
        let mut taken = bytes;
        loop {
            let origin = self.allocate_raw(driver, lifetime, taken)?;
            let span = aligned(origin, taken);
            if span.bytes >= bytes {
                self.hold(taken);
                self.refresh(driver);
                self.log.note(Action::SegmentAlloc, span.address, span.bytes);
                return Ok(span);
            }
            // The driver promises less than page alignment: take a page more (of a pool, a step),
            // and use the aligned inside.
            self.discard(driver, origin, taken);
            if taken > bytes {
                return Err(DriverError::new("span alignment", ErrorKind::Other, 0));
            }
            let more = if self.is_pooled(bytes) { SPAN } else { PAGE };
            taken =
                round_up(bytes, PAGE).and_then(|bytes| bytes.checked_add(more)).unwrap_or(u64::MAX);
        }
    }

    fn allocate_raw(&mut self, driver: &dyn Driver, lifetime: Lifetime, bytes: u64) -> Result<u64> {
        let Some(mut pools) = self.pools.take_if(|_| bytes.is_multiple_of(SPAN)) else {
            let result = driver.alloc(self.device, bytes);
            let address = self.counted(result)?;
            self.plain += bytes;
            return Ok(address);
        };
        let found = self.stream_and_pool(driver, &mut pools, lifetime);
        self.pools = Some(pools);
        let (stream, pool) = found?;
        let result = driver.pool_alloc(self.device, pool, bytes, stream);
        let address = self.counted(result)?;
        let result = driver.stream_synchronize(self.device, stream);
        if let Err(error) = self.counted(result) {
            self.discard(driver, address, bytes);
            return Err(error);
        }
        Ok(address)
    }

    /// Whether a span of `bytes` is of the driver's pools: not a short one, of which a pool would
    /// take a step.
    fn is_pooled(&self, bytes: u64) -> bool {
        self.pools.is_some() && bytes.is_multiple_of(SPAN)
    }

    /// Whether it is known of a span of `bytes` that giving it back may wait for the device, in a
    /// heap that otherwise never waits for that: pools take theirs back on our own stream, and
    /// cuMemFree waits.
    pub(crate) fn waits_to_free(&self, bytes: u64) -> bool {
        self.pools.is_some() && !self.is_pooled(bytes)
    }

    /// The least length from `bytes` on of a span of which it is not known that giving it back may
    /// wait ([`Backing::waits_to_free`]).
    pub(crate) fn length_to_free(&self, bytes: u64) -> Option<u64> {
        if self.waits_to_free(bytes) { bytes.checked_next_multiple_of(SPAN) } else { Some(bytes) }
    }

    fn free_raw(&mut self, driver: &dyn Driver, address: u64, bytes: u64) -> Result<()> {
        if let Some(stream) = self.private_stream().filter(|_| self.is_pooled(bytes)) {
            let result = driver.pool_free(self.device, address, stream);
            return self.counted(result);
        }
        let result = driver.free(self.device, address);
        self.counted(result)?;
        // Blocks of `backing:passthrough` were never spans.
        self.plain = self.plain.saturating_sub(bytes);
        Ok(())
    }

    /// Gives back a span that nobody has seen; where that fails, it is kept as an orphan, so that
    /// nothing is lost.
    fn discard(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        if self.free_raw(driver, origin, taken).is_err() {
            self.keep_orphan(origin, taken);
        }
    }

    /// Gives back a span that [`Backing::allocate_span`] gave and nobody has seen.
    pub(crate) fn return_unseen(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        self.unhold(taken);
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        self.discard(driver, origin, taken);
        self.refresh(driver);
    }

    /// Keeps what the driver would not take back; it counts as held.
    pub(crate) fn keep_orphan(&mut self, origin: u64, taken: u64) {
        self.hold(taken);
        self.orphans.push((origin, taken));
    }

    /// Gives a span back, all of whose uses are done.
    ///
    /// # Errors
    /// The driver's; the span is still held then.
    pub(crate) fn free_span(&mut self, driver: &dyn Driver, origin: u64, taken: u64) -> Result<()> {
        self.free_raw(driver, origin, taken)?;
        self.unhold(taken);
        self.refresh(driver);
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        Ok(())
    }

    /// Tries again to give back what the driver has refused, and makes the pools give their unused
    /// memory to the device.
    pub(crate) fn trim(&mut self, driver: &dyn Driver) {
        for (origin, taken) in std::mem::take(&mut self.orphans) {
            self.unhold(taken);
            self.discard(driver, origin, taken);
        }
        if let Some(stream) = self.private_stream() {
            // What was freed on the private stream counts as unused once that stream is past it.
            let result = driver.stream_synchronize(self.device, stream);
            let _ = self.counted(result);
        }
        for pool in self.made_pools() {
            let result = driver.pool_trim(self.device, pool, 0);
            let _ = self.counted(result);
        }
        self.refresh(driver);
    }

    /// Notes the latest `most` of what comes and goes from now on, for the history; see
    /// [`SegmentLog::keep`].
    pub(crate) fn keep_log(&mut self, most: usize, clear: bool) {
        self.log.keep(most, clear);
        self.pages.log.keep(most, clear);
    }

    /// The logs that [`Backing::keep_log`] keeps.
    pub(crate) fn logs(&self) -> [&SegmentLog; 2] {
        [&self.log, &self.pages.log]
    }

    /// Takes the count of pages over, after they have changed: beside what others brought they are
    /// all that is held.
    pub(crate) fn refresh_pages(&mut self) {
        self.held = self.pages.held() + self.outside.0;
        self.reserved = self.held;
        self.pieces = self.pages.held() / PAGE + self.outside.1;
        self.calls += std::mem::take(&mut self.pages.calls);
        self.errors += std::mem::take(&mut self.pages.errors);
    }

    /// Reads what the driver holds for us in spans.
    pub(crate) fn refresh(&mut self, driver: &dyn Driver) {
        if self.pools.is_none() {
            self.reserved = self.held;
            return;
        }
        let mut reserved = self.plain + self.outside.0;
        for pool in self.made_pools() {
            let result = driver.pool_attribute(self.device, pool, PoolAttribute::ReservedCurrent);
            match self.counted(result) {
                Ok(bytes) => reserved += bytes,
                Err(_) => {
                    // The driver cannot say: what we asked for is a lower bound.
                    self.reserved = self.reserved.max(self.held);
                    return;
                }
            }
        }
        self.reserved = reserved;
    }

    /// The stream on which spans of the pools come and go, if there is one yet.
    fn private_stream(&self) -> Option<StreamHandle> {
        self.pools.as_ref()?.stream
    }

    /// The pools that there are.
    fn made_pools(&self) -> impl Iterator<Item = PoolHandle> + use<> {
        self.pools
            .as_ref()
            .map_or([None; LIFETIMES], |pools| pools.by_lifetime)
            .into_iter()
            .flatten()
    }

    /// The private stream and the pool of a lifetime, made where they are not there yet.
    fn stream_and_pool(
        &mut self,
        driver: &dyn Driver,
        pools: &mut Pools,
        lifetime: Lifetime,
    ) -> Result<(StreamHandle, PoolHandle)> {
        let stream = match pools.stream {
            Some(stream) => stream,
            None => {
                let result = driver.stream_create(self.device);
                *pools.stream.insert(self.counted(result)?)
            }
        };
        if let Some(pool) = pools.by_lifetime[lifetime as usize] {
            return Ok((stream, pool));
        }
        let result = driver.pool_create(self.device, pools.longest);
        let pool = self.counted(result)?;
        for (attribute, value) in pools.settings {
            let result = driver.pool_set_attribute(self.device, pool, attribute, value);
            if let Err(error) = self.counted(result) {
                let _ = driver.pool_destroy(self.device, pool);
                return Err(error);
            }
        }
        for &peer in &self.peers.clone() {
            self.let_reach(driver, pool, peer);
        }
        pools.by_lifetime[lifetime as usize] = Some(pool);
        Ok((stream, pool))
    }

    fn let_reach(&mut self, driver: &dyn Driver, pool: PoolHandle, peer: DeviceId) {
        let result = driver.pool_allow_peer(self.device, pool, peer);
        if let Err(error) = self.counted(result) {
            log::warn!(
                "device {peer} cannot be given access to the memory of device {}: {error}",
                self.device
            );
        }
    }

    /// Lets `peer`, which the process has begun to use, reach this device's memory, now and later.
    pub(crate) fn allow_peer(&mut self, driver: &dyn Driver, peer: DeviceId) {
        if self.peers.contains(&peer) {
            return;
        }
        self.peers.push(peer);
        self.pages.allow_peer(driver, peer);
        for pool in self.made_pools() {
            self.let_reach(driver, pool, peer);
        }
    }

    /// Spans that the driver would not take back: address and bytes.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = (u64, u64)> {
        self.orphans.iter().copied()
    }

    /// Bytes of spans that the driver would not take back.
    pub(crate) fn orphaned(&self) -> u64 {
        self.orphans.iter().map(|orphan| orphan.1).sum()
    }

    /// The driver's count of bytes that our pools have handed out, and ours of what came from none,
    /// to check the books against.
    pub(crate) fn used_by_driver(&self, driver: &dyn Driver) -> Option<u64> {
        self.pools.as_ref()?;
        let used = |pool| driver.pool_attribute(self.device, pool, PoolAttribute::UsedCurrent).ok();
        self.made_pools()
            .map(used)
            .sum::<Option<u64>>()
            .map(|used| used + self.plain + self.outside.0)
    }

    /// Gives the pools and the private stream back (at the heap's end, when no span is held).
    pub(crate) fn close(&mut self, driver: &dyn Driver) {
        let Some(pools) = &mut self.pools else { return };
        for pool in pools.by_lifetime.iter_mut().filter_map(Option::take) {
            let _ = driver.pool_destroy(self.device, pool);
        }
        if let Some(stream) = pools.stream.take() {
            let _ = driver.stream_destroy(self.device, stream);
        }
    }
}

/// The page-aligned inside of what the driver gave.
fn aligned(origin: u64, taken: u64) -> Span {
    let address = origin.next_multiple_of(PAGE);
    let end = (origin + taken) / PAGE * PAGE;
    Span { address, bytes: end.saturating_sub(address), origin, taken }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usable_inside_of_a_span_is_page_aligned() {
        assert_eq!(
            aligned(PAGE, 3 * PAGE),
            Span { address: PAGE, bytes: 3 * PAGE, origin: PAGE, taken: 3 * PAGE }
        );
        let span = aligned(PAGE + 512, 3 * PAGE);
        assert_eq!((span.address, span.bytes), (2 * PAGE, 2 * PAGE));
        assert_eq!(aligned(PAGE + 512, PAGE / 2).bytes, 0);
    }
}
