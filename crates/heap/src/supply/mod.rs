//! The source of a device's memory: one supply for each way to get it, chosen once (`choice`).
//!
//! | supply | memory that it holds | setting |
//! |---|---|---|
//! | `pages` | physical pages, mapped where a row is needed | `backing:stitch` |
//! | `spans` | pieces from the driver's pools, or plain | `backing:pool`, `backing:fixed` |
//! | `direct` | none but plain spans for graphs: a block is the driver's | `backing:passthrough` |
//!
//! A supply keeps no books. [`Central`] has them and knows no supply: the memory held is in its
//! arenas, and [`Backing`] has what the driver gave. The device calls its supply wherever the way
//! matters, and no caller asks which supply it is.

pub(crate) mod backing;
mod choice;
pub(crate) mod direct;
pub(crate) mod pages;
mod spans;

use crate::central::{Central, SupplyTraits};
use crate::driver::{Capabilities, DeviceId, Driver, Result};
use crate::order::query_guard::QueryGuard;
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{RunId, SpaceId};
use crate::settings::Settings;
use crate::supply::backing::Backing;
use gruyere_record::Record;

pub use choice::pages_fit;
pub(crate) use choice::{choose, configured_way};

/// The service of a block outside graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From slabs and free runs.
    Heap,
    /// By a dedicated allocation, at its start.
    Dedicated,
    Driver,
}

/// Free memory that can serve requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Idle {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// The typical request that the count assumed; 0: it counted whole pages.
    pub(crate) typical_request: u64,
}

/// Whether memory may go back to the driver now, and the guard to hold meanwhile.
pub(crate) type MayRelease<'a> = &'a dyn Fn() -> Option<QueryGuard<'a>>;

/// A way to get memory from the driver and to return it. All methods run under the central lock.
pub(crate) trait Supply: Send + Sync {
    /// The word for it in the configuration.
    fn name(&self) -> &'static str;

    /// The driver's side of a heap that holds nothing yet.
    fn open(&self, device: DeviceId, settings: &Settings, total_memory: u64) -> Backing;

    /// The decisions for the whole life of a heap that may hold `room` bytes.
    fn traits(&self, room: u64) -> SupplyTraits;

    fn way(&self, size: u64) -> Way;

    /// Whether the supply can keep memory ready for blocks to come.
    ///
    /// # Errors
    /// The setting that prevents it, in words.
    fn may_keep(&self) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    /// Makes `want` fit. `whole_span`: may take more than needed, for the requests to come.
    ///
    /// # Errors
    /// The driver's error; out of memory, too, if the ceiling would be passed. Nothing is lost
    /// then.
    fn extend(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        whole_span: bool,
    ) -> Result<()>;

    /// A run for `want`, from growth by at most `ctx.fresh` bytes or better use of the memory held.
    /// `None`: neither yields one.
    ///
    /// # Errors
    /// The driver's error, other than out of memory.
    fn grow(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        _may_release: MayRelease<'_>,
    ) -> Result<Option<RunId>> {
        match self.extend(central, ctx, want, false) {
            Ok(()) => Ok(want.fit_or_join(&mut central.arenas)),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether pages move, so that growth may take idle ones if streams share memory.
    fn moves_pages(&self) -> bool {
        false
    }

    /// If enough stale mappings have piled up for growth to unmap the oldest first: how many of
    /// them stay.
    fn unmaps_before_growth(&self, _central: &Central) -> Option<usize> {
        None
    }

    /// Whether growth by `bytes` would look for idle memory before taking fresh memory.
    fn prefers_idle(&self, _central: &Central, _record: &Record, _bytes: u64) -> bool {
        false
    }

    /// Makes `want` fit from idle memory alone, anywhere. False: idle memory does not suffice.
    fn make_room(&self, _central: &mut Central, _ctx: &Growth<'_>, _want: Want) -> bool {
        false
    }

    /// Between two steps: makes rows of idle memory longer where moves have left them short.
    ///
    /// # Errors
    /// The driver's error. Nothing is lost then.
    fn tidy(
        &self,
        _central: &mut Central,
        _ctx: &Growth<'_>,
        _may_release: MayRelease<'_>,
    ) -> Result<()> {
        Ok(())
    }

    /// Takes idle memory of lifetimes and pools out of the arena and returns it, except for
    /// reserves; the bytes returned.
    fn evict(&self, central: &mut Central, ctx: &Eviction<'_>) -> u64;

    /// As [`Supply::evict`] for the spaces of lifetimes in a low-memory phase: at most `most`
    /// bytes, and nothing that waits for the device.
    fn evict_idle(&self, central: &mut Central, ctx: &Eviction<'_>, most: u64);

    /// Takes idle memory in `space` out of the arena, reserves included, with its address space.
    fn evict_space(&self, central: &mut Central, ctx: &Eviction<'_>, space: SpaceId);

    /// Returns to the driver the memory that has left the arena, and what it refused before.
    fn release(&self, central: &mut Central, driver: &dyn Driver);

    /// Reads how much the heap holds.
    fn recount(&self, central: &mut Central, driver: &dyn Driver);

    /// Returns idle memory in `space`, reserves included: the bytes that the arena let go, and
    /// those by which the device holds less.
    fn release_space(
        &self,
        central: &mut Central,
        ctx: &Eviction<'_>,
        space: SpaceId,
    ) -> (u64, u64) {
        // An earlier answer may have been lost, and the difference shows what the driver took.
        self.recount(central, ctx.driver);
        let (before, reserved) = (central.arenas.held_bytes(space), central.backing.reserved);
        self.evict_space(central, ctx, space);
        self.release(central, ctx.driver);
        central.publish_reserved();
        (
            before - central.arenas.held_bytes(space),
            reserved.saturating_sub(central.backing.reserved),
        )
    }

    /// Returns all of the driver's objects; no memory is in use any more.
    fn close(&self, central: &mut Central, driver: &dyn Driver) {
        self.release(central, driver);
        central.backing.close(driver);
    }

    /// The memory of lifetimes that [`Supply::evict`] could return once the work on freed memory is
    /// done (bytes).
    fn evictable(&self, central: &Central) -> u64;

    /// The largest request that the memory held could serve on any stream, once the work on freed
    /// memory is done. `shares`: memory may pass between streams.
    fn largest(&self, central: &Central, shares: bool) -> u64;

    /// The largest request that could be served if the supply takes as much from the driver as the
    /// ceiling allows; the memory held alone serves one of `largest`.
    fn largest_growing(&self, central: &Central, largest: u64) -> u64;

    /// The part of the free memory held that can serve: whole pages if pages move, else the rows
    /// that a typical request fits into (`typical` returns its size, if needed). `free`: free rows
    /// and empty slabs, address and bytes, by address.
    fn idle(&self, central: &Central, free: Vec<(u64, u64)>, typical: &dyn Fn() -> u64) -> Idle;

    /// Whether free memory stays in pieces on a `device` that could move them together; an
    /// out-of-memory report then advises to change that.
    fn leaves_pieces(&self, device: &Capabilities) -> bool;
}
