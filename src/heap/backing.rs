//! Spans: what the driver hands to the heap in one piece, from its pools or as plain allocations.
//!
//! Pools: one for each lifetime. A span is allocated and freed on a private stream that runs no kernels, and that stream is
//! synchronised before a span's first use; a span is freed only when the host knows that all its uses are done. So the driver's
//! own rules of reuse never matter.
#![deny(unsafe_code)]

use super::entry::Action;
use super::lifetime::{LIFETIMES, Lifetime};
use super::segment_log::SegmentLog;
use super::size_class::{PAGE, round_up};
use super::stitch::Pages;
use crate::config::{self, Config, PoolReuse};
use crate::driver::{
    Capabilities, DeviceId, Driver, DriverError, ErrorKind, PoolAttribute, PoolHandle, Result, StreamHandle,
};

/// The step in which the driver's pools grow (bytes). Spans are multiples of it where memory is not short.
pub const SPAN: u64 = 32 << 20;

/// How memory is got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Pages, mapped where they are needed (`stitch`).
    Stitch,
    /// The driver's stream-ordered pools.
    Pool,
    /// `cuMemAlloc`.
    Fixed,
    /// No spans: every request is a `cuMemAlloc`.
    Passthrough,
}

impl Kind {
    /// What the configuration and the device's abilities come to.
    pub fn choose(wish: config::Backing, device: &Capabilities) -> Self {
        let stitch = device.vmm && pages_fit(device.granularity);
        let best = match (stitch, device.pools) {
            (true, _) => Self::Stitch,
            (false, true) => Self::Pool,
            (false, false) => Self::Fixed,
        };
        let is_stitch = matches!(wish, config::Backing::Auto | config::Backing::Stitch);
        if device.vmm && !stitch && is_stitch {
            log::warn!(
                "this device maps memory in units of {} B, of which pages of {PAGE} B are not made; memory cannot be moved, using backing:{}",
                device.granularity,
                best.name()
            );
        }
        let (wanted, there) = match wish {
            config::Backing::Auto => return best,
            config::Backing::Passthrough => return Self::Passthrough,
            config::Backing::Fixed => return Self::Fixed,
            config::Backing::Stitch => (Self::Stitch, stitch),
            config::Backing::Pool => (Self::Pool, device.pools),
        };
        if there {
            return wanted;
        }
        let best = if wanted == Self::Stitch { best } else { Self::Fixed };
        log::warn!(
            "backing:{} was asked for, but the device cannot do it; using backing:{}",
            wanted.name(),
            best.name()
        );
        best
    }

    /// The word of the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stitch => "stitch",
            Self::Pool => "pool",
            Self::Fixed => "fixed",
            Self::Passthrough => "passthrough",
        }
    }
}

/// Where a span came from, to give it back there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte that may be used, a multiple of the page.
    pub address: u64,
    /// Bytes that may be used, a multiple of the page.
    pub bytes: u64,
    /// The driver's address.
    pub origin: u64,
    /// The driver's bytes.
    pub taken: u64,
}

/// The driver side of a device's heap.
pub struct Backing {
    device: DeviceId,
    /// How spans are got.
    pub kind: Kind,
    stream: Option<StreamHandle>,
    pools: [Option<PoolHandle>; LIFETIMES],
    max_pool: u64,
    peers: Vec<DeviceId>,
    threshold: u64,
    reuse: [(PoolAttribute, bool); 2],
    /// Spans that nobody uses and the driver would not take back, (address, bytes): tried again at every trim.
    orphans: Vec<(u64, u64)>,
    /// The pages of `backing:stitch`.
    pub pages: Pages,
    /// What came and went in spans and blocks, for the history; pages have a log of their own.
    pub log: SegmentLog,
    /// Bytes of the spans that are not of the driver's pools, orphans included.
    plain: u64,
    /// Bytes of spans or pages held, orphans included, as asked of the driver.
    pub held: u64,
    /// Physical bytes held, as the driver counts them.
    pub reserved: u64,
    /// Driver calls made for spans.
    pub calls: u64,
    /// Those that failed.
    pub errors: u64,
}

impl Backing {
    /// Holds nothing yet.
    pub fn new(device: DeviceId, kind: Kind, config: &Config, total_memory: u64) -> Self {
        let reuse_on = config.pool_reuse == PoolReuse::On;
        Self {
            device,
            kind,
            stream: None,
            pools: [None; LIFETIMES],
            max_pool: total_memory.next_multiple_of(PAGE),
            peers: Vec::new(),
            threshold: config.release_threshold.map_or(u64::MAX, |size| size.resolve(total_memory)),
            reuse: [
                (PoolAttribute::ReuseAllowOpportunistic, reuse_on),
                (PoolAttribute::ReuseAllowInternalDependencies, reuse_on),
            ],
            orphans: Vec::new(),
            pages: Pages::new(device),
            log: SegmentLog::new(device),
            plain: 0,
            held: 0,
            reserved: 0,
            calls: 0,
            errors: 0,
        }
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
    pub fn take(&mut self, driver: &dyn Driver, lifetime: Lifetime, bytes: u64) -> Result<Span> {
        let mut taken = bytes;
        loop {
            let origin = self.take_raw(driver, lifetime, taken)?;
            let span = aligned(origin, taken);
            if span.bytes >= bytes {
                self.held += taken;
                self.refresh(driver);
                self.log.note(Action::SegmentAlloc, span.address, span.bytes);
                return Ok(span);
            }
            // The driver promises less than page alignment: take a page more (of a pool, a step), and use the aligned inside.
            self.discard(driver, origin, taken);
            if taken > bytes {
                return Err(DriverError::new("span alignment", ErrorKind::Other, 0));
            }
            let more = if self.is_pooled(bytes) { SPAN } else { PAGE };
            taken = round_up(bytes, PAGE).and_then(|bytes| bytes.checked_add(more)).unwrap_or(u64::MAX);
        }
    }

    fn take_raw(&mut self, driver: &dyn Driver, lifetime: Lifetime, bytes: u64) -> Result<u64> {
        if !self.is_pooled(bytes) {
            let result = driver.alloc(self.device, bytes);
            let address = self.counted(result)?;
            self.plain += bytes;
            return Ok(address);
        }
        let stream = self.stream(driver)?;
        let pool = self.pool(driver, lifetime)?;
        let result = driver.pool_alloc(self.device, pool, bytes, stream);
        let address = self.counted(result)?;
        let result = driver.stream_synchronize(self.device, stream);
        if let Err(error) = self.counted(result) {
            self.discard(driver, address, bytes);
            return Err(error);
        }
        Ok(address)
    }

    /// Whether a span of `bytes` is of the driver's pools: not a short one, of which a pool would take a step.
    fn is_pooled(&self, bytes: u64) -> bool {
        self.kind == Kind::Pool && bytes.is_multiple_of(SPAN)
    }

    /// Whether it is known of a span of `bytes` that giving it back may wait for the device, in a heap that otherwise never waits for that: pools take theirs back on our
    /// own stream, and cuMemFree waits.
    pub fn waits_to_give(&self, bytes: u64) -> bool {
        self.kind == Kind::Pool && !self.is_pooled(bytes)
    }

    fn give_raw(&mut self, driver: &dyn Driver, address: u64, bytes: u64) -> Result<()> {
        if let Some(stream) = self.stream.filter(|_| self.is_pooled(bytes)) {
            let result = driver.pool_free(self.device, address, stream);
            return self.counted(result);
        }
        let result = driver.free(self.device, address);
        self.counted(result)?;
        // Blocks of `backing:passthrough` were never spans.
        self.plain = self.plain.saturating_sub(bytes);
        Ok(())
    }

    /// Gives back a span that nobody has seen; where that fails, it is kept as an orphan, so that nothing is lost.
    fn discard(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        if self.give_raw(driver, origin, taken).is_err() {
            self.keep_orphan(origin, taken);
        }
    }

    /// Gives back a span that [`Backing::take`] gave and nobody has seen.
    pub fn return_unseen(&mut self, driver: &dyn Driver, origin: u64, taken: u64) {
        self.held -= taken;
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        self.discard(driver, origin, taken);
        self.refresh(driver);
    }

    /// Keeps what the driver would not take back; it counts as held.
    pub fn keep_orphan(&mut self, origin: u64, taken: u64) {
        self.held += taken;
        self.orphans.push((origin, taken));
    }

    /// Gives a span back, all of whose uses are done.
    ///
    /// # Errors
    /// The driver's; the span is still held then.
    pub fn give(&mut self, driver: &dyn Driver, origin: u64, taken: u64) -> Result<()> {
        self.give_raw(driver, origin, taken)?;
        self.held -= taken;
        self.refresh(driver);
        let span = aligned(origin, taken);
        self.log.note(Action::SegmentFree, span.address, span.bytes);
        Ok(())
    }

    /// Makes the pools give their unused memory to the device.
    pub fn trim(&mut self, driver: &dyn Driver) {
        if self.kind == Kind::Stitch {
            self.pages.release(driver, u64::MAX);
        }
        for (origin, taken) in std::mem::take(&mut self.orphans) {
            self.held -= taken;
            self.discard(driver, origin, taken);
        }
        if let Some(stream) = self.stream {
            // What was freed on the private stream counts as unused once that stream is past it.
            let result = driver.stream_synchronize(self.device, stream);
            let _ = self.counted(result);
        }
        for pool in self.pools.into_iter().flatten() {
            let result = driver.pool_trim(self.device, pool, 0);
            let _ = self.counted(result);
        }
        self.refresh(driver);
    }

    /// Notes the latest `most` of what comes and goes from now on, for the history; see [`SegmentLog::keep`].
    pub fn keep_log(&mut self, most: usize, clear: bool) {
        self.log.keep(most, clear);
        self.pages.log.keep(most, clear);
    }

    /// What was noted so.
    pub fn logs(&self) -> [&SegmentLog; 2] {
        [&self.log, &self.pages.log]
    }

    /// Takes the count of pages over, after they have changed.
    pub fn refresh_pages(&mut self) {
        if self.kind != Kind::Stitch {
            return;
        }
        self.held = self.pages.held();
        self.reserved = self.held;
        self.calls += std::mem::take(&mut self.pages.calls);
        self.errors += std::mem::take(&mut self.pages.errors);
    }

    /// Reads what the driver holds for us.
    pub fn refresh(&mut self, driver: &dyn Driver) {
        if self.kind == Kind::Stitch {
            self.refresh_pages();
            return;
        }
        if self.kind != Kind::Pool {
            self.reserved = self.held;
            return;
        }
        let mut reserved = self.plain;
        for pool in self.pools.into_iter().flatten() {
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

    fn stream(&mut self, driver: &dyn Driver) -> Result<StreamHandle> {
        if let Some(stream) = self.stream {
            return Ok(stream);
        }
        let result = driver.stream_create(self.device);
        let stream = self.counted(result)?;
        self.stream = Some(stream);
        Ok(stream)
    }

    fn pool(&mut self, driver: &dyn Driver, lifetime: Lifetime) -> Result<PoolHandle> {
        if let Some(pool) = self.pools[lifetime as usize] {
            return Ok(pool);
        }
        let result = driver.pool_create(self.device, self.max_pool);
        let pool = self.counted(result)?;
        let settings = self.reuse.map(|(attribute, on)| (attribute, u64::from(on)));
        for (attribute, value) in
            settings.into_iter().chain([(PoolAttribute::ReleaseThreshold, self.threshold)])
        {
            let result = driver.pool_set_attribute(self.device, pool, attribute, value);
            if let Err(error) = self.counted(result) {
                let _ = driver.pool_destroy(self.device, pool);
                return Err(error);
            }
        }
        for &peer in &self.peers.clone() {
            let result = driver.pool_allow_peer(self.device, pool, peer);
            if let Err(error) = self.counted(result) {
                log::warn!(
                    "device {peer} cannot be given access to the memory of device {}: {error}",
                    self.device
                );
            }
        }
        self.pools[lifetime as usize] = Some(pool);
        Ok(pool)
    }

    /// Lets `peer`, which the process has begun to use, reach this device's memory, now and later.
    pub fn allow_peer(&mut self, driver: &dyn Driver, peer: DeviceId) {
        if self.peers.contains(&peer) {
            return;
        }
        self.peers.push(peer);
        self.pages.allow_peer(driver, peer);
        for pool in self.pools.into_iter().flatten() {
            let result = driver.pool_allow_peer(self.device, pool, peer);
            if let Err(error) = self.counted(result) {
                log::warn!(
                    "device {peer} cannot be given access to the memory of device {}: {error}",
                    self.device
                );
            }
        }
    }

    /// Spans that the driver would not take back: address and bytes.
    pub fn orphans(&self) -> impl Iterator<Item = (u64, u64)> {
        self.orphans.iter().copied()
    }

    /// Bytes of spans that the driver would not take back.
    pub fn orphaned(&self) -> u64 {
        self.orphans.iter().map(|orphan| orphan.1).sum()
    }

    /// The driver's count of bytes that our pools have handed out, and ours of what came from none, to check the books against.
    pub fn used_by_driver(&self, driver: &dyn Driver) -> Option<u64> {
        if self.kind != Kind::Pool {
            return None;
        }
        let used = |pool| driver.pool_attribute(self.device, pool, PoolAttribute::UsedCurrent).ok();
        self.pools.into_iter().flatten().map(used).sum::<Option<u64>>().map(|used| used + self.plain)
    }

    /// Gives the pools and the private stream back (at the heap's end, when no span is held).
    pub fn destroy(&mut self, driver: &dyn Driver) {
        self.trim(driver);
        for pool in self.pools.iter_mut().filter_map(Option::take) {
            let _ = driver.pool_destroy(self.device, pool);
        }
        if let Some(stream) = self.stream.take() {
            let _ = driver.stream_destroy(self.device, stream);
        }
    }
}

/// Whether physical memory and mappings of whole pages are whole units of the driver's. Both are powers of two; a page is the unit of all moves.
pub fn pages_fit(granularity: u64) -> bool {
    granularity.is_power_of_two() && PAGE.is_multiple_of(granularity)
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
    fn pages_are_made_of_any_power_of_two_that_divides_them() {
        for granularity in [4 << 10, 64 << 10, 512 << 10, PAGE] {
            assert!(pages_fit(granularity), "{granularity}");
        }
        for granularity in [0, 3 << 10, 2 * PAGE, 512 << 20] {
            assert!(!pages_fit(granularity), "{granularity}");
        }
    }

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
