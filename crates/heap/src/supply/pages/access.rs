//! Access to mapped pages: the device reaches all of its own, and so does each peer that the
//! process uses.
//!
//! A call grants access to a row of mappings
//! ([`crate::supply::pages::reservations::Reservations::rows`]). If the driver refuses one, each
//! mapping has a call of its own: one bad mapping must not keep its neighbours from a peer, and a
//! refused peer must not keep the device from its own memory.
//!
//! ```text
//!   view   -- mapped, granted -->  reached by all;
//!          granted without peers, or refused to a new peer -->  unshared
//!          unshared -- asked again as the heap grows -->  reached by all
//! ```

use crate::driver::{DeviceId, Driver, DriverError, Result};
use crate::supply::pages::chunks::Pages;
use std::ops::Range;

impl Pages {
    fn set_access(
        &mut self,
        driver: &dyn Driver,
        range: &Range<u64>,
        peers: &[DeviceId],
    ) -> Result<()> {
        let result = driver.set_access(self.device, range.start, range.end - range.start, peers);
        self.counted(result)
    }

    /// Lets the device and its peers reach a row of adjacent mappings in one reservation: by one
    /// call if the driver grants it, else mapping by mapping. A mapping refused to a peer keeps no
    /// other from it; each later row asks for it again ([`Pages::share_rest`]).
    ///
    /// # Errors
    /// The driver's error if the device itself does not reach all of the row.
    pub(crate) fn grant(&mut self, driver: &dyn Driver, row: &[Range<u64>]) -> Result<()> {
        let (Some(first), Some(last)) = (row.first(), row.last()) else { return Ok(()) };
        debug_assert!(self.reservations.end_of(first.start).is_none_or(|end| last.end <= end));
        let (peers, all_shared) = (self.peers.clone(), self.unshared.is_empty());
        let Err(error) = self.set_access(driver, &(first.start..last.end), &peers) else {
            return Ok(());
        };
        if error.is_final() || row.len() == 1 && peers.is_empty() {
            return Err(error);
        }
        for view in row {
            if row.len() > 1 && self.set_access(driver, view, &peers).is_ok() {
                continue;
            }
            if peers.is_empty() {
                return Err(error);
            }
            self.set_access(driver, view, &[])?;
            self.unshared.push_back(view.start);
        }
        // Once, and not with each row.
        if all_shared {
            self.tell_unshared(&error);
        }
        Ok(())
    }

    fn tell_unshared(&self, error: &DriverError) {
        if !self.unshared.is_empty() {
            let (count, device, peers) = (self.unshared.len(), self.device, &self.peers);
            log::warn!(
                "devices {peers:?} cannot all be given access to {count} mappings of device \
                 {device}: {error}; retried as the heap grows"
            );
        }
    }

    /// Asks again for mappings refused to peers: one, and while the driver grants it, the next. One
    /// refused again goes behind the others.
    pub(crate) fn share_rest(&mut self, driver: &dyn Driver) {
        let peers = self.peers.clone();
        while let Some(address) = self.unshared.pop_front() {
            let Some(view) = self.view_at(address) else { continue };
            if self.set_access(driver, &view, &peers).is_err() {
                self.unshared.push_back(address);
                return;
            }
        }
    }

    /// Lets `peer` reach this device's pages, those already mapped included.
    pub(crate) fn allow_peer(&mut self, driver: &dyn Driver, peer: DeviceId) {
        if self.peers.contains(&peer) {
            return;
        }
        self.peers.push(peer);
        // One call for each contiguous range of a reservation.
        let rows = self.reservations.rows(self.all_views().map(|view| (view, false)));
        let peers = self.peers.clone();
        let mut refusal = None;
        for row in rows {
            let Err(error) = self.set_access(driver, &row.range, &peers) else { continue };
            refusal = Some(error);
            if error.is_final() {
                break;
            }
            for view in row.views {
                // The next growth asks again for a single mapping.
                let refused = view == row.range || self.set_access(driver, &view, &peers).is_err();
                if refused && !self.unshared.contains(&view.start) {
                    self.unshared.push_back(view.start);
                }
            }
        }
        if let Some(error) = refusal {
            self.tell_unshared(&error);
        }
    }
}
