//! One device's heap: the paths of malloc, free and record_stream.

use crate::bytes::Bytes;
use crate::central::Central;
use crate::driver::{Capabilities, DeviceId, StreamHandle};
use crate::error::Error;
use crate::order::query_guard::QueryGuard;
use crate::order::streams::{Resolved, Streams};
use crate::runs::page_table::Page;
use crate::settings::Settings;
use crate::shared::Shared;
use crate::small::shard::{SHARDS, Shard};
use crate::small::size_class::SMALL_MAX;
use crate::supply::pages::growth::Pace;
use crate::supply::pages::mapping_book::MappingBook;
use crate::supply::{self, Supply};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::upkeep::phase::Watch;
use crate::upkeep::watching::Watching;
use crossbeam_utils::{Backoff, CachePadded};
use gruyere_record::{EventKind, ShardWriter, clock};
use std::sync::atomic::{AtomicU32, Ordering};

/// A shard and its part of the record, behind one lock.
pub(crate) struct ShardCell {
    pub(crate) shard: Shard,
    pub(crate) writer: ShardWriter,
}

/// One device's heap.
pub struct Device {
    pub(crate) id: DeviceId,
    /// What the device can do.
    pub(crate) capabilities: Capabilities,
    pub(crate) streams: Streams,
    pub(crate) shards: Box<[CachePadded<Mutex<ShardCell>>; SHARDS]>,
    /// Everything else: large blocks, spans, captures.
    pub(crate) central: Mutex<Central>,
    /// Pool scopes that are open (from begin to end of an allocation to a capture's pool); above 0
    /// nothing is asked of events, recorded or waited for.
    ///
    /// ```text
    ///   pool_scopes  n -> n + 1   the begin hook, BEFORE it looks at `queries`;
    ///                n -> n - 1   the end hook, under the central lock
    ///   queries      n <-> n + 1  whoever asks events, records or waits, for as long as that
    ///                             takes; raised BEFORE it looks at `pool_scopes`
    /// ```
    /// Both are SeqCst: of a begin hook and a query at the same time, one sees the other. The hook
    /// waits then, the query never does.
    pub(crate) pool_scopes: AtomicU32,
    /// The streams that capture, as their callers say ([`crate::Heap::capture_begins`]); each has a
    /// pool scope open.
    pub(crate) capturing: Mutex<Vec<StreamHandle>>,
    queries: AtomicU32,
    /// Where the device's memory comes from.
    pub(crate) supply: &'static dyn Supply,
    pub(crate) watching: Watching,
}

/// The most that may be held on a device, bytes: `limit:`; else its memory, and of memory that it
/// shares with the host what the host could give, as the driver does not refuse more, and the
/// machine hangs (pytorch/pytorch#174358).
pub(crate) fn ceiling(settings: &Settings, capabilities: &Capabilities) -> u64 {
    let total = capabilities.total_memory;
    let default = capabilities.host_memory.map_or(total, |bytes| bytes.min(total));
    settings.limit.map_or(default, |limit| limit.resolve(total))
}

/// Whether a request is served from the arena rather than from slabs.
#[inline(always)]
pub const fn is_large(size: u64) -> bool {
    size > SMALL_MAX
}

/// Who owns an address.
pub enum Owned<'a> {
    /// A slab: the device, the shard and the slab's number there.
    Small(&'a Device, u32, u32),
    /// Large blocks: the device and the page.
    Large(&'a Device, Page<'a>),
}

impl Device {
    /// Makes the heap of `id`; nothing is taken from the driver yet.
    ///
    /// # Errors
    /// The driver's, where the device cannot be used.
    pub(crate) fn new(shared: &Shared, id: DeviceId) -> Result<Self, Error> {
        let capabilities = shared.driver.capabilities(id)?;
        let total = capabilities.total_memory;
        let supply = supply::choose(shared.settings.backing, &capabilities, shared.dedicated);
        let mut backing = supply.open(id, &shared.settings, total);
        backing.pages.book = MappingBook::new(shared.record, id);
        let limit = ceiling(&shared.settings, &capabilities);
        if limit < total && shared.settings.limit.is_none() {
            log::info!(
                "device {id} shares the host's memory: at most {} of it will be held, which is \
                 what the host has available now; `limit` sets another bound",
                Bytes(limit)
            );
        }
        log::info!(
            "device {id} ({}): backing {}, {} of memory, at most {} of it held",
            capabilities.name,
            supply.name(),
            Bytes(total),
            Bytes(limit.min(total))
        );
        let record = shared.record;
        let shards = (0..SHARDS).map(|shard| {
            let writer = record.shard(id, shard as u32);
            CachePadded::new(Mutex::new(ShardCell { shard: Shard::new(SHARDS as u32), writer }))
        });
        let habits = supply.habits(limit.min(total));
        let writers = [SHARDS, SHARDS + 1].map(|number| record.shard(id, number as u32));
        let mut central =
            Central::new(id, backing, writers, record.device(id), (total, limit), habits);
        central.slack = shared.settings.slack;
        central.pace = Pace::new(shared.settings.slack.is_some());
        let gives_back = shared.settings.auto_trim && !shared.settings.debug.mapped;
        central.watch = Watch::new(gives_back && habits.gives_back_idle);
        Ok(Self {
            id,
            streams: Streams::new(id, capabilities.stream_ids, capabilities.context_events),
            shards: shards
                .collect::<Box<[_]>>()
                .try_into()
                .map_err(|_| Error::Internal("lanes were miscounted"))?,
            central: Mutex::new(central),
            pool_scopes: AtomicU32::new(0),
            capturing: Mutex::default(),
            queries: AtomicU32::new(0),
            supply,
            watching: Watching::new(&shared.settings.alert),
            capabilities,
        })
    }

    /// The number of a stream's shard.
    #[inline]
    pub(crate) const fn shard_number(stream: u32) -> u32 {
        stream % SHARDS as u32
    }

    /// The shard of a stream, locked.
    #[inline]
    pub(crate) fn shard(&self, stream: u32) -> MutexGuard<'_, ShardCell> {
        lock(&self.shards[Self::shard_number(stream) as usize])
    }

    /// As [`Streams::fence`], in a call that names stream `named`; while [`Device::query_guard`] is
    /// held.
    pub(crate) fn fence(&self, shared: &Shared, named: Option<u32>) -> bool {
        self.streams.fence(&*shared.driver, shared.hears_of_captures(), named)
    }

    /// As [`Streams::fence_all`], in a call that names stream `named`; while
    /// [`Device::query_guard`] is held.
    pub(crate) fn fence_all(&self, shared: &Shared, named: Option<u32>) -> bool {
        self.streams.fence_all(&*shared.driver, shared.hears_of_captures(), named)
    }

    /// The stream that `handle` names, for the call in which the program names it. What could not
    /// be done for a passing stream since the last such call is done in this one: the event behind
    /// its frees is recorded, if somebody has wanted it.
    ///
    /// # Errors
    /// Too many streams are in use; what the driver says where it could not be found out which are
    /// not.
    #[inline]
    pub(crate) fn named(
        &self,
        shared: &Shared,
        handle: StreamHandle,
    ) -> Result<Resolved<'_>, Error> {
        let found = match self.streams.resolve(&*shared.questions, handle) {
            Some(found) => found,
            None => self.resolve_by_recycling(shared, handle)?,
        };
        if found.due {
            self.attend(shared, &found);
        }
        Ok(found)
    }

    #[cold]
    fn attend(&self, shared: &Shared, found: &Resolved<'_>) {
        self.streams.note_capture(found, !self.may_query());
        if !found.captures()
            && let Some(_guard) = self.query_guard()
        {
            self.streams.fence_lost(&*shared.driver, found.number);
        }
    }

    /// Whether the streams may be asked about events: not while anything captures.
    pub(crate) fn may_query(&self) -> bool {
        self.pool_scopes.load(Ordering::SeqCst) == 0
    }

    /// As [`Device::may_query`]; no pool scope opens while the answer is held.
    pub(crate) fn query_guard(&self) -> Option<QueryGuard<'_>> {
        let guard = QueryGuard::new(&self.queries);
        self.may_query().then_some(guard)
    }

    /// Notes that a pool scope opens, and waits until nobody asks any more. To be called without
    /// any lock.
    pub(crate) fn open_pool_scope(&self) {
        self.pool_scopes.fetch_add(1, Ordering::SeqCst);
        let backoff = Backoff::new();
        while self.queries.load(Ordering::SeqCst) != 0 {
            backoff.snooze();
        }
    }

    /// Whether spans may be given back to the driver, and what to hold meanwhile. cuMemFree waits
    /// for the device: not while anything captures.
    pub(crate) fn release_guard(&self, shared: &Shared) -> Option<QueryGuard<'_>> {
        let guard = self.query_guard()?;
        let quiet = shared.hears_of_captures() || !self.streams.any_capturing(&*shared.driver);
        quiet.then_some(guard)
    }

    /// Notes an event of the device in the ring.
    pub(crate) fn event(&self, shared: &Shared, kind: EventKind, address: u64, size: u64) {
        shared.record.event(kind, self.id as u8, 0, 0, address, size, clock::now());
    }
}
