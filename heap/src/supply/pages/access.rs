//! Which devices reach mapped pages: the device itself all of them, and each peer that the process
//! uses too.
//!
//! A call grants access to a row of mappings
//! ([`crate::supply::pages::reservations::Reservations::rows`]). Where the driver refuses one, each
//! mapping is asked for by itself: one bad mapping must not keep its neighbours from a peer, and a
//! peer that is refused must not keep the device from its own memory.
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

    /// Lets the device and its peers reach a row of mappings, which lie next to each other in one
    /// reservation: by one call where that is granted, else mapping by mapping. What a peer is
    /// refused keeps nobody else from it: it is asked for again with each later row
    /// ([`Pages::share_rest`]).
    ///
    /// # Errors
    /// The driver's: the device itself does not reach all of it.
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
                 {device}: {error}; it is asked for again as the heap grows"
            );
        }
    }

    /// Asks again for what peers were refused: for one mapping, and as long as it is granted for
    /// the next. One that is refused again goes behind the others.
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

    /// Lets `peer` reach this device's pages, those that are mapped already too.
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
                // A single mapping is asked for again when the heap grows.
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
