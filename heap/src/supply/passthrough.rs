//! No memory is kept: every block is the driver's own (`central/direct.rs`). But what a graph uses
//! must stay when its block is freed, so that comes in plain spans.

use super::spans::Spans;
use super::{Helper, Idle, Supply, Way};
use crate::central::{Central, Habits};
use crate::driver::{Capabilities, DeviceId, Driver, Result};
use crate::request::{Eviction, Growth, Want};
use crate::runs::arena::{RunId, SpaceId};
use crate::settings::Settings;
use crate::supply::backing::Backing;

const OF_GRAPHS: &Spans = &Spans::PLAIN;

pub(super) struct Passthrough;

impl Supply for Passthrough {
    fn name(&self) -> &'static str {
        "passthrough"
    }

    fn open(&self, device: DeviceId, settings: &Settings, total_memory: u64) -> Backing {
        OF_GRAPHS.open(device, settings, total_memory)
    }

    fn habits(&self, _: u64) -> Habits {
        Habits::default()
    }

    fn way(&self, _: u64) -> Way {
        Way::Driver
    }

    fn may_keep(&self) -> std::result::Result<(), &'static str> {
        Err("backing:passthrough, which keeps no memory")
    }

    fn extend(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        whole_span: bool,
    ) -> Result<()> {
        OF_GRAPHS.extend(central, ctx, want, whole_span)
    }

    fn grow(
        &self,
        central: &mut Central,
        ctx: &Growth<'_>,
        want: Want,
        helper: &dyn Helper,
    ) -> Result<Option<RunId>> {
        OF_GRAPHS.grow(central, ctx, want, helper)
    }

    fn evict(&self, central: &mut Central, ctx: &Eviction<'_>) -> u64 {
        OF_GRAPHS.evict(central, ctx)
    }

    fn evict_idle(&self, central: &mut Central, ctx: &Eviction<'_>, most: u64) {
        OF_GRAPHS.evict_idle(central, ctx, most);
    }

    fn evict_space(&self, central: &mut Central, ctx: &Eviction<'_>, space: SpaceId) {
        OF_GRAPHS.evict_space(central, ctx, space);
    }

    fn release(&self, central: &mut Central, driver: &dyn Driver) {
        OF_GRAPHS.release(central, driver);
    }

    fn recount(&self, central: &mut Central, driver: &dyn Driver) {
        OF_GRAPHS.recount(central, driver);
    }

    fn evictable(&self, central: &Central) -> u64 {
        OF_GRAPHS.evictable(central)
    }

    fn largest(&self, central: &Central, shares: bool) -> u64 {
        OF_GRAPHS.largest(central, shares)
    }

    fn largest_growing(&self, central: &Central, largest: u64) -> u64 {
        OF_GRAPHS.largest_growing(central, largest)
    }

    fn idle(&self, central: &Central, free: Vec<(u64, u64)>, typical: &dyn Fn() -> u64) -> Idle {
        OF_GRAPHS.idle(central, free, typical)
    }

    fn leaves_pieces(&self, device: &Capabilities) -> bool {
        OF_GRAPHS.leaves_pieces(device)
    }
}
