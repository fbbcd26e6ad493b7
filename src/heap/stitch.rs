//! Stitched pages: physical memory in pages that can be mapped wherever a run of them is needed.
//!
//! The unit is one physical handle of a page (the driver unmaps whole mappings only). A page is mapped at one address at a time:
//! it is unmapped only when the host knows that no work touches it any more, so no alias is ever needed. A move is planned by the
//! arena, its pages are gathered here, mapped, and made accessible in one call; whatever fails half-way is undone in
//! reverse, and a page is always in exactly one place:
//!
//! ```text
//!   spare    <-- create --  (the driver's)            spare  -- release --> (the driver's)
//!   spare    -- map -->  mapped  -- set_access -->  (handed to the arena: a page of a free run)
//!   mapped   -- unmap -->  spare                      undo, steal, trim
//!   mapped   -- unmap fails in an undo -->  stuck     nobody's; unmapped again at the next trim
//! ```
#![deny(unsafe_code)]

use super::size_class::PAGE;
use crate::driver::{DeviceId, Driver, PhysicalHandle, Result};
use std::collections::BTreeMap;

/// The pages of a device.
#[derive(Default)]
pub struct Pages {
    device: DeviceId,
    peers: Vec<DeviceId>,
    /// Handles mapped nowhere.
    spare: Vec<PhysicalHandle>,
    /// By address: the page that is mapped there and belongs to the arena.
    mapped: BTreeMap<u64, PhysicalHandle>,
    /// Mapped pages without an owner: they could not be unmapped when a move was undone.
    stuck: Vec<(u64, PhysicalHandle)>,
    /// Driver calls made.
    pub calls: u64,
    /// Those that failed.
    pub errors: u64,
}

impl Pages {
    /// None yet.
    pub fn new(device: DeviceId) -> Self {
        Self { device, ..Self::default() }
    }

    fn counted<T>(&mut self, result: Result<T>) -> Result<T> {
        self.calls += 1;
        self.errors += u64::from(result.is_err());
        result
    }

    /// Physical bytes held.
    pub fn held(&self) -> u64 {
        (self.spare.len() + self.mapped.len() + self.stuck.len()) as u64 * PAGE
    }

    /// Bytes that are mapped for the arena.
    pub fn mapped(&self) -> u64 {
        self.mapped.len() as u64 * PAGE
    }

    /// Bytes mapped nowhere.
    pub fn spare(&self) -> u64 {
        self.spare.len() as u64 * PAGE
    }

    /// Address ranges that must stay as they are: pages are stuck there.
    pub fn stuck(&self) -> impl Iterator<Item = u64> {
        self.stuck.iter().map(|page| page.0)
    }

    /// Takes a page from the driver.
    ///
    /// # Errors
    /// The driver's.
    pub fn create(&mut self, driver: &dyn Driver) -> Result<()> {
        let result = driver.physical_create(self.device, PAGE);
        let handle = self.counted(result)?;
        self.spare.push(handle);
        Ok(())
    }

    /// Unmaps the arena's pages in a range; they are spare then. Nothing may touch them any more.
    ///
    /// # Errors
    /// The driver's; nothing has changed then.
    pub fn unmap(&mut self, driver: &dyn Driver, address: u64, bytes: u64) -> Result<()> {
        let result = driver.unmap(self.device, address, bytes);
        self.counted(result)?;
        for page in (address..address + bytes).step_by(PAGE as usize) {
            self.spare.extend(self.mapped.remove(&page));
        }
        Ok(())
    }

    /// Maps spare pages at a range of address space that has none, for the arena.
    ///
    /// # Errors
    /// The driver's (or `None` as code 0: fewer spare pages than it takes). All pages are spare again then, or stuck.
    pub fn map(&mut self, driver: &dyn Driver, address: u64, bytes: u64) -> Result<()> {
        let mut done = 0;
        let mut result = Ok(());
        while done < bytes && result.is_ok() {
            let Some(handle) = self.spare.pop() else { break };
            let mapped = driver.map(self.device, address + done, PAGE, handle);
            match self.counted(mapped) {
                Ok(()) => {
                    self.mapped.insert(address + done, handle);
                    done += PAGE;
                }
                Err(error) => {
                    self.spare.push(handle);
                    result = Err(error);
                }
            }
        }
        if result.is_ok() && done == bytes {
            let access = driver.set_access(self.device, address, bytes, &self.peers);
            result = self.counted(access);
        }
        if result.is_err() || done < bytes {
            self.undo(driver, address, done);
        }
        result
    }

    /// Takes a half-done mapping back, page by page from its end.
    fn undo(&mut self, driver: &dyn Driver, address: u64, bytes: u64) {
        for page in (0..bytes / PAGE).rev().map(|page| address + page * PAGE) {
            if self.unmap(driver, page, PAGE).is_err()
                && let Some(handle) = self.mapped.remove(&page)
            {
                self.stuck.push((page, handle));
            }
        }
    }

    /// Tries the stuck pages again; the addresses that are clear now.
    pub fn unstick(&mut self, driver: &dyn Driver) -> Vec<u64> {
        let mut clear = Vec::new();
        for (page, handle) in std::mem::take(&mut self.stuck) {
            let result = driver.unmap(self.device, page, PAGE);
            if self.counted(result).is_ok() {
                self.spare.push(handle);
                clear.push(page);
            } else {
                self.stuck.push((page, handle));
            }
        }
        clear
    }

    /// Gives spare pages back to the driver until `keep` bytes of them are left. The bytes given.
    pub fn release(&mut self, driver: &dyn Driver, keep: u64) -> u64 {
        let mut given = 0;
        while self.spare() > keep {
            let Some(handle) = self.spare.pop() else { break };
            let result = driver.physical_release(self.device, handle);
            if self.counted(result).is_err() {
                self.spare.push(handle);
                break;
            }
            given += PAGE;
        }
        given
    }

    /// Lets `peer` reach this device's pages, those that are mapped already too.
    pub fn allow_peer(&mut self, driver: &dyn Driver, peer: DeviceId) {
        if self.peers.contains(&peer) {
            return;
        }
        self.peers.push(peer);
        let pages: Vec<u64> = self.mapped.keys().copied().collect();
        // One call for each contiguous range.
        for range in pages.chunk_by(|a, b| a + PAGE == *b) {
            let bytes = range.len() as u64 * PAGE;
            let result = driver.set_access(self.device, range[0], bytes, &self.peers);
            if let Err(error) = self.counted(result) {
                log::warn!(
                    "device {peer} cannot be given access to the memory of device {}: {error}",
                    self.device
                );
            }
        }
    }
}
