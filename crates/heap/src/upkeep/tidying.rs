//! When idle memory is put into longer rows (`supply/pages/compact`): at the end of a step, or,
//! while the program marks none, at a look at its use of memory.

use crate::device::Device;
use crate::lifetime::Lifetime;
use crate::request::Growth;
use crate::shared::Shared;
use crate::sync::lock;
use crate::upkeep::phase::Occasion;
use gruyere_record::EventKind;
use std::sync::atomic::Ordering;

/// A program that has freed so many runs and marked no step marks none: the first step of most
/// trainings frees fewer.
const UNMARKED: u64 = 1 << 12;

impl Device {
    /// Makes rows of idle memory longer where moves have left them short, if streams share memory:
    /// else nothing moves. Between two steps most memory is free; a look may come at a step's peak.
    pub(crate) fn tidy(&self, shared: &Shared, occasion: Occasion) {
        let least = match occasion {
            Occasion::Step => 0,
            Occasion::Due if shared.step.load(Ordering::Relaxed) == 0 => UNMARKED,
            Occasion::Due | Occasion::Mark(_) => return,
        };
        if !shared.shares() {
            return;
        }
        let central = &mut *lock(&self.central);
        if central.arenas.changes() < least {
            return;
        }
        let growth = Growth::of(shared, &self.streams, Lifetime::default());
        let may_release = || self.release_guard(shared);
        if let Err(error) = self.supply.tidy(central, &growth, &may_release) {
            log::debug!("device {}: a compaction failed: {error}", self.id);
            self.event(shared, EventKind::DriverError, 0, u64::from(error.code));
        }
    }
}
