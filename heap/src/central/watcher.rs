//! Books of a program that is only watched: large blocks.

use crate::central::Central;
use crate::watcher::{SAMPLE_EVERY, Watched};
use gruyere_record::DeviceGauge;

impl Central {
    #[inline(always)]
    pub(crate) fn publish_watched(&mut self) {
        let Watched { held, changes, .. } = &mut self.watched;
        *changes += 1;
        let (held, is_due) = (*held, *changes % SAMPLE_EVERY == 1);
        (self.backing.held, self.backing.reserved) = (held, held);
        if held > self.peak_reserved {
            self.peak_reserved = held;
            self.gauges.set(&[(DeviceGauge::Reserved, held), (DeviceGauge::ReservedPeak, held)]);
        } else {
            self.gauges.set(&[(DeviceGauge::Reserved, held)]);
        }
        if is_due {
            self.sample_watched();
        }
    }

    #[cold]
    #[inline(never)]
    fn sample_watched(&mut self) {
        let held = self.watched.held;
        self.usage.hold(held, self.watched.blocks.len() as u64);
        self.gauges.sample(held);
    }
}
