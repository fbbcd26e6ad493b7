//! Opening and closing what other processes export.

use crate::driver::{DeviceId, Driver, IpcHandle};
use crate::heap::Heap;
use crate::sharing::foreign::{Import, Imports, NextChunk, NotImported};
use crate::sync::lock;

impl Heap {
    /// Maps memory of another process, `bytes` in all, from the chunks that `next` returns. The
    /// same `name` means the same memory: it is mapped once, and each further call returns the same
    /// address. Close it as often ([`Heap::close_import`]).
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
        self.import(device, name, |import, driver, peers| import.map(driver, peers, bytes, next))
    }

    /// Opens a plain allocation of another process. As often as it is opened, it must be closed.
    ///
    /// # Errors
    /// [`NotImported::Driver`], [`NotImported::Device`].
    pub fn import_plain(&self, device: DeviceId, handle: IpcHandle) -> Result<u64, NotImported> {
        self.import(device, &handle, |import, driver, _| Ok(import.open_plain(driver, handle)?))
    }

    fn import(
        &self,
        device: DeviceId,
        name: &[u8],
        open: impl FnOnce(&mut Import, &dyn Driver, &[DeviceId]) -> Result<(), NotImported>,
    ) -> Result<u64, NotImported> {
        let user = self.device(device.into()).map_err(NotImported::Device)?;
        let peers = lock(&user.central).backing.peers().to_vec();
        let mut imports = lock(&self.imports);
        let key = (device, name.into());
        if let Some(address) = imports.open_again(&key) {
            return Ok(address);
        }
        self.give_back_remains(&mut imports);
        let mut import = Import::new(device);
        match open(&mut import, &*self.shared.driver, &peers) {
            Ok(()) => Ok(imports.open(key, import)),
            Err(error) => {
                imports.remains.push(import);
                self.give_back_remains(&mut imports);
                Err(error)
            }
        }
    }

    /// Closes an import once. With the last time, waits for the device and gives the mapping back;
    /// later, if a stream captures. False: nothing is open at `address`.
    pub fn close_import(&self, address: u64) -> bool {
        let mut imports = lock(&self.imports);
        let is_open = imports.close(address);
        self.give_back_remains(&mut imports);
        is_open
    }

    fn give_back_remains(&self, imports: &mut Imports) {
        imports.remains.retain_mut(|import| !self.is_given_back(import));
    }

    /// Gives back what can be given back. True: that is all, or no later call can succeed.
    fn is_given_back(&self, import: &mut Import) -> bool {
        if import.is_used {
            let user = self.device_in_use(import.device.into()).ok().flatten();
            if !user.is_some_and(|device| device.synchronize(&self.shared)) {
                return false;
            }
            import.is_used = false;
        }
        import.give_back(&*self.shared.driver).map_or_else(|error| error.is_final(), |()| true)
    }

    /// Number of imports that are open, and of those that could not be given back yet.
    pub fn imports(&self) -> (usize, usize) {
        let imports = lock(&self.imports);
        (imports.opened(), imports.remains.len())
    }
}
