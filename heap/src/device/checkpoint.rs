//! The program says that memory is low: a checkpoint is written, an epoch is over.
//!
//! What lies idle then is given back, unless little would come of it or it was done a short while
//! ago: memory that is given back must be taken from the driver again, at some hundred microseconds
//! for a page of 2 MiB.

use crate::device::Device;
use crate::shared::Shared;
use crate::sync::lock;
use std::time::Instant;

/// Memory is low where less than this part of the peak of live bytes is live: three in four.
const LOW: (u64, u64) = (3, 4);

impl Device {
    pub(crate) fn checkpoint(&self, shared: &Shared, now: Instant) -> u64 {
        let (live, peak) = shared.record.live(self.id);
        {
            let mut central = lock(&self.central);
            let idle = central.backing.reserved.saturating_sub(live);
            let is_low = live / LOW.0 < peak / LOW.1 && idle > peak / LOW.1;
            let frees = central.arenas.changes();
            if !is_low || !central.watch.checkpoint(frees, now) {
                return 0;
            }
        }
        self.trim(shared)
    }
}
