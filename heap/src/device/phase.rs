//! Looks for low memory.

use crate::device::Device;
use crate::profiler::{self, What};
use crate::request::Eviction;
use crate::shared::Shared;
use crate::sync::lock;
use crate::upkeep::phase::{Drain, Occasion, Seen};
use gruyere_record::{DeviceGauge, EventKind};
use std::time::Instant;

impl Device {
    /// Looks at the use of memory, and gives back what lies idle in a low-memory phase. To be
    /// called without any lock.
    #[cold]
    pub(crate) fn watch(&self, shared: &Shared, occasion: Occasion) {
        let now = Instant::now();
        let (drain, publish) = {
            let central = &mut *lock(&self.central);
            let publish = occasion == Occasion::Due && central.watch.is_time_to_publish();
            let recent = central.arenas.sample_busy_peak();
            let seen = Seen {
                now: central.arenas.changes(),
                time: now,
                busy: central.arenas.busy(),
                peak: central.arenas.take_busy_peak(),
                held: central.backing.held,
            };
            central.gauges.sample(recent);
            profiler::live(self.id, || shared.record.live(self.id).0);
            (central.watch.look(occasion, seen), publish)
        };
        if publish {
            self.publish_gauges(shared);
        }
        // Where record_stream does not reach us, an event does not tell that memory is idle.
        if let Some(drain) = drain
            && shared.shares()
        {
            self.drain(shared, drain);
        }
        self.look_at_thresholds(shared, now);
    }

    /// Gives idle memory back until `drain.keep` bytes are held or `drain.most` are given. Idle is
    /// what is unowned, or a stream's that is past it.
    fn drain(&self, shared: &Shared, drain: Drain) {
        let driver = &*shared.driver;
        {
            let Some(_guard) = self.query_guard() else { return };
            self.fence_all(shared, None);
            self.streams.poll(driver);
        }
        self.return_empty_slabs(shared);
        let mut central = lock(&self.central);
        self.collect_completed(shared, &mut central);
        let Some(_guard) = self.release_guard(shared) else { return };
        let _range = profiler::range(What::LowMemoryTrim, central.backing.reserved);
        let completed = |stream| self.streams.completed(stream);
        let eviction = Eviction { completed: &completed, ..Eviction::of(shared, &self.streams) };
        let held = central.backing.held;
        let most = held.saturating_sub(drain.keep).min(drain.most);
        self.supply.evict_idle(&mut central, &eviction, most);
        central.publish_reserved();
        let bytes = held.saturating_sub(central.backing.held);
        if bytes > 0 {
            central.headroom_is_open = false;
            let (trims, given) = (central.watch.given.0 + 1, central.watch.given.1 + bytes);
            central.watch.given = (trims, given);
            central
                .gauges
                .set(&[(DeviceGauge::LowPhaseTrims, trims), (DeviceGauge::LowPhaseBytes, given)]);
            drop(central);
            self.event(shared, EventKind::Trim, 0, bytes);
        }
    }
}
