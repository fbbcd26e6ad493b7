//! Alerts of a device.

use crate::device::Device;
use crate::shared::Shared;
use crate::upkeep::alerts::{ALERTS, Alert, AlertKind};

impl Device {
    /// Raises an alert of the device, to which the holder of no lock has come.
    pub(crate) fn alert(
        &self,
        shared: &Shared,
        kind: AlertKind,
        asked: u64,
        reserved: u64,
        count: u64,
    ) {
        if ALERTS.are_wanted() {
            let (live, live_peak) = shared.record.live(self.id);
            let device = self.id;
            ALERTS.raise(&Alert {
                kind,
                device,
                asked,
                reserved,
                live,
                live_peak,
                count,
                threshold: 0,
                value: 0.0,
            });
        }
    }
}
