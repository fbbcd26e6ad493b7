//! The driver's side of a heap: spans that the driver hands over in one piece, from its pools or as
//! plain allocations.
//!
//! There is a pool for each lifetime. A span is allocated and freed on a private stream that runs
//! no kernels, and that stream is synchronised before a span's first use; the heap frees a span
//! only when the host knows that all its uses are done. So the driver's own rules of reuse never
//! matter.

use crate::driver::{
    DeviceId, Driver, DriverError, ErrorKind, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use crate::journal::{Action, SegmentLog};
use crate::lifetime::{LIFETIMES, Lifetime};
use crate::settings::{PoolReuse, Settings};
use crate::small::size_class::{PAGE, round_up};
use crate::supply::pages::chunks::Pages;

/// The step by which the driver's pools grow (bytes). Spans are multiples of it unless memory is
/// short.
pub(crate) const SPAN: u64 = 32 << 20;

/// A span, with its origin for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First usable byte, a multiple of the page.
    pub(crate) address: u64,
    /// Usable bytes, a multiple of the page.
    pub(crate) bytes: u64,
    pub(crate) origin: u64,
    /// Bytes that the driver gave.
    pub(crate) taken: u64,
}

/// The driver's pools for a heap's spans, each made with its first span.
struct Pools {
    /// A stream of the heap's own: no kernel runs on it.
    stream: Option<StreamHandle>,
    by_lifetime: [Option<PoolHandle>; LIFETIMES],
    /// The most that one pool may hold (bytes).
    longest: u64,
    /// The pools' settings at creation.
    settings: [(PoolAttribute, u64); 3],
}

pub(crate) struct Backing {
    device: DeviceId,
    /// The source of spans, except short ones; without it, all are plain allocations.
    pools: Option<Pools>,
    peers: Vec<DeviceId>,
    /// Unused spans that the driver refused to take back, (address, bytes); every trim tries again.
    orphans: Vec<(u64, u64)>,
    /// The pages of `backing:stitch`.
    pub(crate) pages: Pages,
    /// Spans and blocks that came and went, for the history; pages have a log of their own.
    pub(crate) log: SegmentLog,
    /// Bytes of spans outside the driver's pools, orphans included.
    plain: u64,
    /// Segments that callers brought: bytes and number.
    outside: (u64, u64),
    /// Bytes of spans or pages held, orphans and brought segments included, as asked of the driver.
    pub(crate) held: u64,
    /// Physical bytes held, by the driver's count.
    pub(crate) reserved: u64,
    /// Number of pieces held: spans, orphans, blocks of the driver's own; or pages.
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

    /// Adds the driver's pools as the source of spans.
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

    /// The devices that reach this one's memory.
    pub(crate) fn peers(&self) -> &[DeviceId] {
        &self.peers
    }

    /// Counts a further piece.
    pub(crate) fn hold(&mut self, bytes: u64) {
        self.held += bytes;
        self.pieces += 1;
    }

    /// Counts a piece that went back.
    pub(crate) fn unhold(&mut self, bytes: u64) {
        self.held -= bytes;
        self.pieces -= 1;
    }

    /// Counts a segment that a caller brought.
    pub(crate) fn hold_outside(&mut self, address: u64, bytes: u64) {
        self.outside = (self.outside.0 + bytes, self.outside.1 + 1);
        self.hold(bytes);
        self.reserved += bytes;
        self.log.note(Action::SegmentAlloc, address, bytes);
    }

    /// Counts a brought segment that goes back to the caller.
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
    /// The driver's error.
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
            // The driver promises less than page alignment: take a page more (a step more from a
            // pool), and use the aligned inside.
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

    /// Whether a span of `bytes` comes from the driver's pools; a short one, for which a pool would
    /// take a step, does not.
    pub(crate) fn is_pooled(&self, bytes: u64) -> bool {
        self.pools.is_some() && bytes.is_multiple_of(SPAN)
    }

    /// Whether returning a span of `bytes` may wait for the device, in a heap that otherwise never
    /// does: pools take spans back on our own stream, but cuMemFree waits.
    pub(crate) fn waits_to_free(&self, bytes: u64) -> bool {
        self.pools.is_some() && !self.is_pooled(bytes)
    }

    /// The least length, from `bytes` on, of a span that goes back without a wait
    /// ([`Backing::waits_to_free`]).
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

    /// Returns an unused span; if the driver refuses, keeps it as an orphan, so that nothing is
    /// lost.
    fn discard(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        if self.free_raw(driver, origin, taken).is_err() {
            self.keep_orphan(origin, taken);
        }
    }

    /// Returns a span from [`Backing::allocate_span`] that was never used.
    pub(crate) fn return_unseen(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        self.unhold(taken);
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        self.discard(driver, origin, taken);
        self.refresh(driver);
    }

    /// Keeps memory that the driver refused to take back; it counts as held.
    pub(crate) fn keep_orphan(&mut self, origin: u64, taken: u64) {
        self.hold(taken);
        self.orphans.push((origin, taken));
    }

    /// Returns a span, with all its uses done, to the driver.
    ///
    /// # Errors
    /// The driver's error; the span is still held then.
    pub(crate) fn free_span(&mut self, driver: &dyn Driver, origin: u64, taken: u64) -> Result<()> {
        self.free_raw(driver, origin, taken)?;
        self.unhold(taken);
        self.refresh(driver);
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        Ok(())
    }

    /// Offers the driver again what it refused, and makes the pools return their unused memory to
    /// the device.
    pub(crate) fn trim(&mut self, driver: &dyn Driver) {
        for (origin, taken) in std::mem::take(&mut self.orphans) {
            self.unhold(taken);
            self.discard(driver, origin, taken);
        }
        if let Some(stream) = self.private_stream() {
            // Frees on the private stream count as unused memory once that stream is past them.
            let result = driver.stream_synchronize(self.device, stream);
            let _ = self.counted(result);
        }
        for pool in self.made_pools() {
            let result = driver.pool_trim(self.device, pool, 0);
            let _ = self.counted(result);
        }
        self.refresh(driver);
    }

    /// From now on keeps the latest `most` arrivals and departures, for the history; see
    /// [`SegmentLog::keep`].
    pub(crate) fn keep_log(&mut self, most: usize, clear: bool) {
        self.log.keep(most, clear);
        self.pages.log.keep(most, clear);
    }

    /// The logs that [`Backing::keep_log`] keeps.
    pub(crate) fn logs(&self) -> [&SegmentLog; 2] {
        [&self.log, &self.pages.log]
    }

    /// Takes over the count of pages after a change: with brought segments they are all that is
    /// held.
    pub(crate) fn refresh_pages(&mut self) {
        self.held = self.pages.held() + self.outside.0;
        self.reserved = self.held;
        self.pieces = self.pages.held() / PAGE + self.outside.1;
        self.calls += std::mem::take(&mut self.pages.calls);
        self.errors += std::mem::take(&mut self.pages.errors);
    }

    /// Reads what the driver holds for our spans.
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
                    // The driver cannot say: the bytes that we asked for are a lower bound.
                    self.reserved = self.reserved.max(self.held);
                    return;
                }
            }
        }
        self.reserved = reserved;
    }

    /// The stream on which the pools' spans come and go, if it exists yet.
    fn private_stream(&self) -> Option<StreamHandle> {
        self.pools.as_ref()?.stream
    }

    /// The pools made so far.
    fn made_pools(&self) -> impl Iterator<Item = PoolHandle> + use<> {
        self.pools
            .as_ref()
            .map_or([None; LIFETIMES], |pools| pools.by_lifetime)
            .into_iter()
            .flatten()
    }

    /// The private stream and the pool of a lifetime; makes them if missing.
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

    /// Lets `peer`, newly used by the process, access this device's memory, present and future.
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

    /// Spans that the driver refused to take back: address and bytes.
    pub(crate) fn orphans(&self) -> impl Iterator<Item = (u64, u64)> {
        self.orphans.iter().copied()
    }

    /// Bytes of spans that the driver refused to take back.
    pub(crate) fn orphaned(&self) -> u64 {
        self.orphans.iter().map(|orphan| orphan.1).sum()
    }

    /// The bytes that our pools have handed out by the driver's count, plus ours outside pools, to
    /// check the books against.
    pub(crate) fn used_by_driver(&self, driver: &dyn Driver) -> Option<u64> {
        self.pools.as_ref()?;
        let used = |pool| driver.pool_attribute(self.device, pool, PoolAttribute::UsedCurrent).ok();
        self.made_pools()
            .map(used)
            .sum::<Option<u64>>()
            .map(|used| used + self.plain + self.outside.0)
    }

    /// Returns the pools and the private stream, at the heap's end, when no span is held.
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

/// The page-aligned inside of the driver's piece.
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
