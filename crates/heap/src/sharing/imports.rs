//! Opening and closing what other processes export.
//!
//! Opens come one at a time, under `Heap::opening`, and wait for the sender. The books have a lock
//! of their own, under which nothing waits: a close goes on while a sender is slow.

use crate::driver::{DeviceId, Driver, IpcHandle};
use crate::heap::Heap;
use crate::path::synchronize::Unsynchronized;
use crate::sharing::foreign::{Import, NextChunk, NotImported};
use crate::sync::lock;

impl Heap {
    /// Maps memory of another process, `bytes` in all, from the chunks that `next` returns. The
    /// same `name` means the same memory: it is mapped once for a device, and each further call
    /// returns the same address. Close it as often ([`Heap::close_import`]).
    ///
    /// # Errors
    /// [`NotImported`]; nothing stays mapped then.
    pub fn import_chunks(
        &self,
        device: DeviceId,
        name: &[u8],
        bytes: u64,
        next: NextChunk<'_>,
    ) -> Result<u64, NotImported> {
        self.import(device, name, |import, driver| import.map(driver, bytes, next))
    }

    /// Opens a plain allocation of another process. As often as it is opened, it must be closed.
    ///
    /// # Errors
    /// [`NotImported::Driver`], [`NotImported::Device`].
    pub fn import_plain(&self, device: DeviceId, handle: IpcHandle) -> Result<u64, NotImported> {
        self.import(device, &handle, |import, driver| import.open_plain(driver, handle))
    }

    fn import(
        &self,
        device: DeviceId,
        name: &[u8],
        open: impl FnOnce(&mut Import, &dyn Driver) -> Result<(), NotImported>,
    ) -> Result<u64, NotImported> {
        let user = self.device(device.into()).map_err(NotImported::Device)?;
        let _opening = lock(&self.opening);
        let key = (device, name.into());
        if let Some(address) = lock(&self.imports).open_again(&key) {
            return Ok(address);
        }
        self.give_back_imports();
        let driver = &*self.shared.driver;
        let mut import = Import::new(key);
        let opened = open(&mut import, driver);
        // Under the lock: a device that the process begins to use now sees the import, or its
        // number is among the peers.
        let mut imports = lock(&self.imports);
        if let Err(error) = opened {
            imports.keep(vec![import]);
            drop(imports);
            self.give_back_imports();
            return Err(error);
        }
        let peers = lock(&user.central).backing.peers().to_vec();
        warn_of_refused_peers(import.allow_peers(driver, &peers), &peers);
        Ok(imports.open(import))
    }

    /// Closes an import once. With the last time, waits for the device and gives the mapping back;
    /// later, if a stream captures. False: nothing is open at `address`.
    pub fn close_import(&self, address: u64) -> bool {
        let is_open = lock(&self.imports).close(address);
        self.give_back_imports();
        is_open
    }

    /// Lets `peer`, newly used by the process, reach what `device` has open.
    pub(crate) fn allow_peer_of_imports(&self, device: DeviceId, peer: DeviceId) {
        for import in lock(&self.imports).of(device) {
            warn_of_refused_peers(import.allow_peers(&*self.shared.driver, &[peer]), &[peer]);
        }
    }

    /// Gives back what closed imports have of the driver, as far as that is possible now. Call with
    /// no lock of a device held.
    pub(crate) fn give_back_imports(&self) {
        let mut remains = lock(&self.imports).take_remains();
        if remains.is_empty() {
            return;
        }
        remains.retain_mut(|import| !self.is_given_back(import));
        lock(&self.imports).keep(remains);
    }

    /// Gives back what can be given back. True: that is all, or no later call can succeed.
    fn is_given_back(&self, import: &mut Import) -> bool {
        if import.is_used {
            let user = self.device_in_use(import.device().into()).ok().flatten();
            match user.map(|device| device.synchronize_epochs(&self.shared)) {
                Some(Ok(_)) => import.is_used = false,
                Some(Err(Unsynchronized::Refused(error))) if error.is_final() => return true,
                _ => return false,
            }
        }
        import.give_back(&*self.shared.driver).map_or_else(|error| error.is_final(), |()| true)
    }

    /// Number of imports that are open, and of those that could not be given back yet.
    pub fn imports(&self) -> (usize, usize) {
        lock(&self.imports).counts()
    }
}

fn warn_of_refused_peers(allowed: crate::driver::Result<()>, peers: &[DeviceId]) {
    if let Err(error) = allowed {
        log::warn!(
            "CUDA tensors of another process cannot be used on device {peers:?}: {error}; copy \
             them first"
        );
    }
}
