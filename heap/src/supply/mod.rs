//! Where a device's memory comes from: one supply for each way to get it, chosen once (`choice`).
//!
//! | supply | what it holds | settings |
//! |---|---|---|
//! | `remapped` | physical pages, mapped where a run of them is needed | `backing:stitch` |
//! | `spans` | what the driver gives in one piece, of its pools or plain | `backing:pool`, `backing:fixed` |
//! | `passthrough` | nothing: every block is the driver's; a graph's memory comes in plain spans | `backing:passthrough` |
//!
//! A supply keeps no books. What is held stands in [`Central`], which knows no supply: its arenas,
//! and [`Backing`] for what the driver gave. The device asks its supply wherever the way matters,
//! and nobody asks which it is.

pub(crate) mod backing;
mod choice;
pub(crate) mod direct;
pub(crate) mod pages;
mod spans;

use crate::central::{Central, Habits};
use crate::driver::{Capabilities, DeviceId, Driver, Result};
use crate::order::query_guard::QueryGuard;
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{RunId, SpaceId};
use crate::settings::Settings;
use crate::supply::backing::Backing;
use gruyere_record::Record;

pub use choice::pages_fit;
pub(crate) use choice::{choose, configured_way};

/// How a block is served that is no graph's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From slabs and free runs.
    Heap,
    /// By a dedicated allocation, at its start.
    Dedicated,
    Driver,
}

/// Free memory that can serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Idle {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// The request by which that was told; 0: by whole pages.
    pub(crate) typical_request: u64,
}

/// Whether memory may be given back to the driver, and what to hold meanwhile.
pub(crate) type MayRelease<'a> = &'a dyn Fn() -> Option<QueryGuard<'a>>;

/// A way to get memory from the driver and to give it back. All of it under the central lock.
pub(crate) trait Supply: Send + Sync {
    /// The word of the configuration.
    fn name(&self) -> &'static str;

    /// The driver's side of a heap that holds nothing yet.
    fn open(&self, device: DeviceId, settings: &Settings, total_memory: u64) -> Backing;

    /// What is decided for the heap, once and for all, where it may hold `room` bytes.
    fn habits(&self, room: u64) -> Habits;

    /// How a block of `size` bytes is served.
    fn way(&self, size: u64) -> Way;

    /// Whether memory can be kept ready for blocks to come.
    ///
    /// # Errors
    /// Who says no: the setting, in words.
    fn may_keep(&self) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    /// Makes `want` fit. `whole_span`: more than it needs may be taken, for what comes next.
    ///
    /// # Errors
    /// The driver's; out of memory also where the ceiling would be passed. Nothing is lost then.
    fn extend(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        whole_span: bool,
    ) -> Result<()>;

    /// A run for `want`: the heap grows by at most `ctx.fresh` bytes, or makes better use of what
    /// it holds. `None`: neither does.
    ///
    /// # Errors
    /// The driver's, but for out of memory.
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

    /// Whether pages move, so that growth may take idle ones where streams share memory.
    fn moves_pages(&self) -> bool {
        false
    }

    /// Whether so many stale mappings have piled up that growth first unmaps them.
    fn unmaps_before_growth(&self, _central: &Central) -> bool {
        false
    }

    /// Whether growth by `bytes` would look for idle memory before it takes fresh memory.
    fn prefers_idle(&self, _central: &Central, _record: &Record, _bytes: u64) -> bool {
        false
    }

    /// Makes `want` fit from idle memory alone, wherever it lies. False: that cannot be.
    fn make_room(&self, _central: &mut Central, _ctx: &Growth<'_>, _want: Want) -> bool {
        false
    }

    /// Takes what lies idle in the spaces of lifetimes and pools out of the arena and gives it
    /// back, but for what is reserved. The bytes.
    fn evict(&self, central: &mut Central, ctx: &Eviction<'_>) -> u64;

    /// As [`Supply::evict`], of the spaces of lifetimes, at most `most` bytes, and nothing that
    /// waits for the device: a low-memory phase's.
    fn evict_idle(&self, central: &mut Central, ctx: &Eviction<'_>, most: u64);

    /// Takes what lies idle in `space` out of the arena, whatever is reserved, and its address
    /// space with it.
    fn evict_space(&self, central: &mut Central, ctx: &Eviction<'_>, space: SpaceId);

    /// Gives the driver what is out of the arena, and what it has refused before.
    fn release(&self, central: &mut Central, driver: &dyn Driver);

    /// Finds out how much is held.
    fn recount(&self, central: &mut Central, driver: &dyn Driver);

    /// Gives back what lies idle in `space`, whatever is reserved: the bytes that the arena let go
    /// of, and those by which the device holds less.
    fn release_space(
        &self,
        central: &mut Central,
        ctx: &Eviction<'_>,
        space: SpaceId,
    ) -> (u64, u64) {
        // An earlier answer may have been missed, and what is given is told by the difference.
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

    /// Gives the driver all of its objects back, where no memory is in use any more.
    fn close(&self, central: &mut Central, driver: &dyn Driver) {
        self.release(central, driver);
        central.backing.close(driver);
    }

    /// How much [`Supply::evict`] could give back of the spaces of lifetimes, once the work on what
    /// was freed is done (bytes).
    fn evictable(&self, central: &Central) -> u64;

    /// The largest request that what is held could satisfy, on any stream, once the work on what
    /// was freed is done. `shares`: memory may pass from stream to stream.
    fn largest(&self, central: &Central, shares: bool) -> u64;

    /// The largest request that could be satisfied if as much is taken from the driver as the
    /// ceiling allows, where what is held satisfies one of `largest`.
    fn largest_growing(&self, central: &Central, largest: u64) -> u64;

    /// What of the free memory held can serve: whole pages where they move, else rows that a
    /// typical request fits into (`typical`: its size; asked for only where it matters). `free`:
    /// free rows and slabs without a block, address and bytes by address.
    fn idle(&self, central: &Central, free: Vec<(u64, u64)>, typical: &dyn Fn() -> u64) -> Idle;

    /// Whether free memory stays in pieces on a `device` that could move them together: what an
    /// out-of-memory report advises.
    fn leaves_pieces(&self, device: &Capabilities) -> bool;
}
