//! Alerts of a device.
#![deny(unsafe_code)]

use crate::heap::alerts::{ALERTS, Alert, AlertKind};
use crate::heap::device::Device;
use crate::heap::shared::Shared;

impl Device {
    /// Raises an alert of the device, to which the holder of no lock has come.
    pub(in crate::heap) fn alert(
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
