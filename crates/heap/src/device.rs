//! A GPU's heap: its streams, its shards, the central lock, and the guards around captures.

use crate::central::Central;
use crate::driver::{Capabilities, DeviceId, StreamHandle};
use crate::error::Error;
use crate::order::query_guard::QueryGuard;
use crate::order::streams::{Resolved, Streams};
use crate::runs::page_table::Page;
use crate::settings::Settings;
use crate::shared::Shared;
use crate::small::shard::{SHARDS, Shard};
use crate::small::size_class::{PAGE, SMALL_MAX};
use crate::supply::pages::growth::Pace;
use crate::supply::pages::mapping_book::MappingBook;
use crate::supply::{self, Supply};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::upkeep::phase::Watch;
use crate::upkeep::watching::Watching;
use crossbeam_utils::{Backoff, CachePadded};
use gruyere_record::size::{Bytes, Size};
use gruyere_record::{EventKind, ShardWriter, clock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A shard and its part of the record, behind one lock.
pub(crate) struct ShardCell {
    pub(crate) shard: Shard,
    pub(crate) writer: ShardWriter,
}

/// A GPU's heap.
pub struct Device {
    pub(crate) id: DeviceId,
    /// What the device can do.
    pub(crate) capabilities: Capabilities,
    pub(crate) streams: Streams,
    pub(crate) shards: Box<[CachePadded<Mutex<ShardCell>>; SHARDS]>,
    /// The rest: large blocks, spans, captures.
    pub(crate) central: Mutex<Central>,
    /// Open pool scopes, each from begin to end of an allocation to a capture's pool. Above 0 the
    /// heap asks, records and waits for no event.
    ///
    /// ```text
    ///   pool_scopes  n -> n + 1   the begin hook, BEFORE it looks at `queries`;
    ///                n -> n - 1   the end hook, under the central lock
    ///   queries      n <-> n + 1  each thread that asks events, records or waits, for as long as
    ///                             that takes; raised BEFORE it looks at `pool_scopes`
    /// ```
    /// Both are SeqCst: of a begin hook and a query at the same time, one sees the other. The hook
    /// then waits, the query never does.
    pub(crate) pool_scopes: AtomicU32,
    /// The capturing streams that callers announced ([`crate::Heap::capture_begins`]); each has an
    /// open pool scope.
    pub(crate) capturing: Mutex<Vec<StreamHandle>>,
    queries: AtomicU32,
    /// Where the device's memory comes from.
    pub(crate) supply: &'static dyn Supply,
    pub(crate) watching: Watching,
}

/// The ceiling on what a device holds, bytes. `limit:` sets it; the default is the device's memory.
/// Of memory shared with the host it is what the host could give: there the driver does not refuse
/// more, and the machine hangs (pytorch/pytorch#174358).
pub(crate) fn ceiling(settings: &Settings, capabilities: &Capabilities) -> u64 {
    let total = capabilities.total_memory;
    let default = capabilities.host_memory.map_or(total, |bytes| bytes.min(total));
    settings.limit.map_or(default, |limit| limit.resolve(total))
}

/// Refuses a share as `limit:` that is less than a page of this device, as the settings' parser
/// refuses bytes: every request would be out of memory.
///
/// # Errors
/// [`Error::Setting`].
fn check_limit(settings: &Settings, id: DeviceId, total: u64) -> Result<(), Error> {
    match settings.limit {
        Some(limit @ Size::Percent(_)) if limit.resolve(total) < PAGE => {
            let least = Size::Bytes(PAGE);
            Err(Error::Setting(
                format!(
                    "limit:{limit}: that is {} of the {} of device {id}, and {least} is the least; \
                     set a larger share, or a size such as 2GiB",
                    Bytes(limit.resolve(total)),
                    Bytes(total)
                )
                .into(),
            ))
        }
        _ => Ok(()),
    }
}

/// Whether the arena serves a request, not slabs.
#[inline(always)]
pub const fn is_large(size: u64) -> bool {
    size > SMALL_MAX
}

/// The owner of an address.
pub enum Owned<'a> {
    /// A slab: the device, the shard and the slab's number there.
    Small(&'a Device, u32, u32),
    /// Large blocks: the device and the page.
    Large(&'a Device, Page<'a>),
}

impl Device {
    /// Creates the heap of device `id`; takes no memory from the driver yet.
    ///
    /// # Errors
    /// The driver's error, if the device cannot be used; [`Error::Setting`].
    pub(crate) fn new(shared: &Shared, id: DeviceId) -> Result<Self, Error> {
        let capabilities = shared.driver.capabilities(id)?;
        let total = capabilities.total_memory;
        check_limit(&shared.settings, id, total)?;
        let supply = supply::choose(shared.settings.backing, &capabilities, shared.dedicated);
        let mut backing = supply.open(id, &shared.settings, total);
        backing.pages.book = MappingBook::new(shared.record, id);
        let limit = ceiling(&shared.settings, &capabilities);
        if limit < total && shared.settings.limit.is_none() {
            log::info!(
                "device {id} shares the host's memory: at most {} of it will be held, the host \
                 memory available now; `limit` sets another ceiling",
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
        let traits = supply.traits(limit.min(total));
        let writers = [SHARDS, SHARDS + 1].map(|number| record.shard(id, number as u32));
        let mut central =
            Central::new(id, backing, writers, record.device(id), (total, limit), traits);
        central.slack = shared.settings.slack;
        central.pace = Pace::new(shared.settings.slack.is_some());
        let gives_back = shared.settings.auto_trim && !shared.settings.debug.mapped;
        central.watch = Watch::new(gives_back && traits.gives_back_idle);
        Ok(Self {
            id,
            streams: Streams::new(
                id,
                capabilities.stream_ids,
                capabilities.context_events,
                Arc::clone(&shared.hooks),
            ),
            shards: shards
                .collect::<Box<[_]>>()
                .try_into()
                .map_err(|_| Error::Internal("shards were miscounted"))?,
            central: Mutex::new(central),
            pool_scopes: AtomicU32::new(0),
            capturing: Mutex::default(),
            queries: AtomicU32::new(0),
            supply,
            watching: Watching::new(&shared.settings.alert),
            capabilities,
        })
    }

    #[inline]
    pub(crate) const fn shard_number(stream: u32) -> u32 {
        stream % SHARDS as u32
    }

    /// Locks the shard of a stream.
    #[inline]
    pub(crate) fn shard(&self, stream: u32) -> MutexGuard<'_, ShardCell> {
        lock(&self.shards[Self::shard_number(stream) as usize])
    }

    /// Calls [`Streams::fence`] in a call that names stream `named`. Hold [`Device::query_guard`].
    pub(crate) fn fence(&self, shared: &Shared, named: Option<u32>) -> bool {
        self.streams.fence(&*shared.driver, shared.hears_of_captures(), named)
    }

    /// Calls [`Streams::fence_all`] in a call that names stream `named`. Hold
    /// [`Device::query_guard`].
    pub(crate) fn fence_all(&self, shared: &Shared, named: Option<u32>) -> bool {
        self.streams.fence_all(&*shared.driver, shared.hears_of_captures(), named)
    }

    /// The stream that `handle` names, in a call in which the program names it. Also does for a
    /// passing stream what has waited for such a call: records the event behind its frees, if a
    /// request has needed it or a batch of frees was complete.
    ///
    /// # Errors
    /// [`Error::TooManyStreams`] if all numbers are in use; the driver's error if it cannot be
    /// found out which numbers are not.
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

    /// Notes a malloc on stream `number`, which the call names.
    #[inline]
    pub(crate) fn note_malloc(&self, shared: &Shared, number: u32) {
        if self.streams.is_unripe(number) {
            self.ripen(shared, number);
        }
    }

    #[cold]
    #[inline(never)]
    fn ripen(&self, shared: &Shared, number: u32) {
        self.streams.ripen(number);
        if self.streams.is_wanted(number)
            && let Some(_guard) = self.query_guard()
        {
            self.streams.fence_wanted(&*shared.driver, number);
        }
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

    /// Whether streams may be asked about events: not while anything captures.
    pub(crate) fn may_query(&self) -> bool {
        self.pool_scopes.load(Ordering::SeqCst) == 0
    }

    /// [`Device::may_query`], held: no pool scope opens until the guard is dropped.
    pub(crate) fn query_guard(&self) -> Option<QueryGuard<'_>> {
        let guard = QueryGuard::new(&self.queries);
        self.may_query().then_some(guard)
    }

    /// Counts a pool scope as open, then waits until no query is under way. Call it with no lock
    /// held.
    pub(crate) fn open_pool_scope(&self) {
        self.pool_scopes.fetch_add(1, Ordering::SeqCst);
        let backoff = Backoff::new();
        while self.queries.load(Ordering::SeqCst) != 0 {
            backoff.snooze();
        }
    }

    /// A guard under which spans may go back to the driver; `None` while anything captures, as
    /// cuMemFree waits for the device.
    pub(crate) fn release_guard(&self, shared: &Shared) -> Option<QueryGuard<'_>> {
        let guard = self.query_guard()?;
        let quiet = shared.hears_of_captures() || !self.streams.any_capturing(&*shared.driver);
        quiet.then_some(guard)
    }

    /// Writes an event of the device to the ring.
    pub(crate) fn event(&self, shared: &Shared, kind: EventKind, address: u64, size: u64) {
        shared.record.event(kind, self.id as u8, 0, 0, address, size, clock::now());
    }
}
