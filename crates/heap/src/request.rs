//! Requests: of the heap, of its runs, and of what grows it.

use crate::driver::{DeviceId, Driver};
use crate::lifetime::Lifetime;
use crate::order::streams::Streams;
use crate::runs::arena::{Arenas, RunId, SpaceId};
use crate::runs::page_table::PageTable;
use crate::shared::Shared;
use crate::small::size_class::{PAGE, round};
use gruyere_record::{BlockEntry, EventKind, Record, ShardWriter, SiteId};

/// A request, as the door (the entry point that the program called) has understood it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Bytes asked for, above 0.
    pub(crate) size: u64,
    pub(crate) stream: u32,
    pub(crate) lifetime: Lifetime,
    /// When the call came in, for the record.
    pub(crate) start: u64,
    /// Its site, for the slab that may be made for it.
    pub(crate) site: SiteId,
}

impl Request {
    /// A request of `size` bytes without a site.
    #[inline(always)]
    pub(crate) fn new(size: u64, stream: u32, lifetime: Lifetime, start: u64) -> Self {
        Self { size, stream, lifetime, start, site: SiteId::NONE }
    }

    /// Of a large block: its lifetime, its bytes and its stream.
    #[inline(always)]
    pub(crate) fn large(&self) -> (Lifetime, u64, u32) {
        (self.lifetime, round(self.size), self.stream)
    }

    pub(crate) fn entry(&self, device: DeviceId, step: u32, capture: u8) -> BlockEntry {
        BlockEntry {
            address: 0,
            size: round(self.size),
            requested: self.size,
            stream: self.stream,
            step,
            device: device as u8,
            lifetime: self.lifetime as u8,
            capture,
            is_sent: false,
            site: SiteId::NONE,
        }
    }

    /// Notes in the record that the request was served.
    #[inline]
    pub(crate) fn note(&self, writer: &mut ShardWriter, address: u64) {
        writer.event(
            EventKind::Malloc,
            self.lifetime as u8,
            self.stream,
            address,
            self.size,
            self.start,
        );
    }
}

/// A run that the heap needs: `bytes` at a multiple of `align`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// The space for it.
    pub(crate) space: SpaceId,
    pub(crate) bytes: u64,
    /// Its alignment, a power of two.
    pub(crate) align: u64,
    pub(crate) stream: u32,
}

impl Want {
    /// Takes the run from free memory.
    #[inline(always)]
    pub(crate) fn fit(&self, arenas: &mut Arenas) -> Option<RunId> {
        arenas.allocate(self.space, self.bytes, self.align, self.stream)
    }

    /// Takes the run from free memory, or from joined neighbours.
    pub(crate) fn fit_or_join(&self, arenas: &mut Arenas) -> Option<RunId> {
        self.fit(arenas).or_else(|| arenas.join(self.space, self.bytes, self.align, self.stream))
    }
}

/// What growth needs to know.
pub(crate) struct Growth<'a> {
    pub(crate) driver: &'a dyn Driver,
    pub(crate) table: &'a PageTable,
    pub(crate) record: &'a Record,
    /// The lifetime whose pool the span comes from.
    pub(crate) lifetime: Lifetime,
    /// The number of the capture, as the record counts captures.
    pub(crate) capture: u8,
    /// Fresh bytes that growth may take from the driver.
    pub(crate) fresh: u64,
    /// Whether little memory is left, of which `fresh` may be a part.
    pub(crate) little_left: bool,
    /// Whether moves may take any time: memory is short.
    pub(crate) any_time: bool,
    /// Whether pages may move: not while anything captures.
    pub(crate) moves: bool,
    /// Whether growth may pass the slack where too little lies idle.
    pub(crate) past_slack: bool,
    pub(crate) streams: &'a Streams,
    /// The last epoch that a stream is past, for free memory that it still owns.
    pub(crate) completed: &'a dyn Fn(u32) -> u64,
}

impl<'a> Growth<'a> {
    pub(crate) fn of(shared: &'a Shared, streams: &'a Streams, lifetime: Lifetime) -> Self {
        Self {
            driver: &*shared.driver,
            table: &shared.table,
            record: shared.record,
            lifetime,
            capture: 0,
            fresh: u64::MAX,
            little_left: false,
            any_time: false,
            moves: false,
            past_slack: true,
            streams,
            completed: &|_| 0,
        }
    }

    /// The eviction that goes with this growth; it learns of no stream how far it is.
    pub(crate) fn eviction(&self) -> Eviction<'a> {
        let Self { driver, record, streams, .. } = *self;
        Eviction { driver, record, streams, completed: &|_| 0 }
    }
}

/// What eviction and giving back need to know.
pub(crate) struct Eviction<'a> {
    pub(crate) driver: &'a dyn Driver,
    pub(crate) record: &'a Record,
    pub(crate) streams: &'a Streams,
    /// The last epoch that a stream is past, for free memory that it still owns.
    pub(crate) completed: &'a dyn Fn(u32) -> u64,
}

impl<'a> Eviction<'a> {
    /// The eviction of unowned memory.
    pub(crate) fn of(shared: &'a Shared, streams: &'a Streams) -> Self {
        Self { driver: &*shared.driver, record: shared.record, streams, completed: &|_| 0 }
    }
}

/// Whether the pages of a request would go beyond the page table's addresses.
#[inline]
pub(crate) fn is_absurd(size: u64) -> bool {
    size > (1 << 48) - PAGE
}
