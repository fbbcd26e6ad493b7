//! The books of other processes' memory that is mapped in this one.
//!
//! ```text
//!   import   -- all of it mapped -->  open, used once;  opened again -->  used once more
//!            -- a driver call fails -->  remains of it
//!   open     -- closed as often as opened -->  remains, which the device may still use
//!   remains  -- opened again before anything was given back -->  open
//!            -- each driver call that gives them back succeeds -->  gone
//!            -- one fails, or a stream captures -->  kept, and tried again: with each later import
//!                                                    and close, at steps, at `empty_cache`, at the
//!                                                    end of a capture
//! ```
//!
//! What is open here is held by the process that exported it, and counts there.

use crate::driver::{DeviceId, Driver, DriverError, IpcHandle, PhysicalHandle, Result};
use crate::error::Error;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::OwnedFd;

/// The file of an exported chunk, and the chunk's bytes.
pub type ChunkFile = (OwnedFd, u64);

/// Returns the chunks of an import, one a call.
///
/// # Errors
/// Why the chunk did not come.
pub type NextChunk<'a> = &'a mut dyn FnMut() -> std::result::Result<ChunkFile, String>;

/// Why another process's memory was not opened.
#[derive(Debug)]
pub enum NotImported {
    /// The chunks did not come: why.
    Sender(String),
    /// The driver refused on this device.
    Driver(DeviceId, DriverError),
    /// The device cannot be used.
    Device(Error),
}

impl fmt::Display for NotImported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sender(why) => f.write_str(why),
            Self::Driver(device, error) => write!(
                f,
                "the CUDA driver refused to map it on device {device}: {error} (the device must be \
                 the sender's GPU, or one that can access it)"
            ),
            Self::Device(error) => error.fmt(f),
        }
    }
}

/// The device that uses an import, and the sender's name of the memory.
pub(crate) type Key = (DeviceId, Box<[u8]>);

/// What an import has of the driver.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) key: Key,
    pub(crate) address: u64,
    /// Bytes of address space; 0: none, since it is a plain allocation, or not any more.
    reserved: u64,
    /// Bytes mapped from `address` on.
    mapped: u64,
    /// Handles not yet released.
    handles: Vec<PhysicalHandle>,
    /// A plain allocation is open at `address`.
    is_plain: bool,
    /// Work may use the memory: all of it is there.
    pub(crate) is_used: bool,
}

impl Import {
    /// An import that has nothing yet.
    pub(crate) fn new(key: Key) -> Self {
        let handles = Vec::new();
        Self { key, address: 0, reserved: 0, mapped: 0, handles, is_plain: false, is_used: false }
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.key.0
    }

    /// Maps chunks one behind the other, `bytes` in all, for the device.
    ///
    /// # Errors
    /// The sender's or the driver's; give back what is there then.
    pub(crate) fn map(
        &mut self,
        driver: &dyn Driver,
        bytes: u64,
        next: NextChunk<'_>,
    ) -> std::result::Result<(), NotImported> {
        let device = self.device();
        let refused = |error| NotImported::Driver(device, error);
        self.address = driver.address_reserve(device, bytes, 0).map_err(refused)?;
        self.reserved = bytes;
        while self.mapped < bytes {
            let (file, length) = next().map_err(NotImported::Sender)?;
            if length == 0 || length > bytes - self.mapped {
                return Err(NotImported::Sender("the sender's chunks have other lengths".into()));
            }
            let handle = driver.physical_import(device, file).map_err(refused)?;
            self.handles.push(handle);
            driver.map(device, self.address + self.mapped, length, handle).map_err(refused)?;
            self.mapped += length;
            // The mapping keeps the memory.
            driver.physical_release(device, handle).map_err(refused)?;
            self.handles.pop();
        }
        driver.set_access(device, self.address, bytes, &[]).map_err(refused)
    }

    /// Lets `peers` reach what is mapped. A plain allocation follows the driver's own rules.
    ///
    /// # Errors
    /// The driver's; the device itself reaches it all the same.
    pub(crate) fn allow_peers(&self, driver: &dyn Driver, peers: &[DeviceId]) -> Result<()> {
        if self.mapped == 0 || peers.is_empty() {
            return Ok(());
        }
        driver.set_access(self.device(), self.address, self.mapped, peers)
    }

    /// Opens a plain allocation.
    ///
    /// # Errors
    /// [`NotImported::Driver`].
    pub(crate) fn open_plain(
        &mut self,
        driver: &dyn Driver,
        handle: IpcHandle,
    ) -> std::result::Result<(), NotImported> {
        let device = self.device();
        let opened = driver.ipc_open(device, handle);
        self.address = opened.map_err(|error| NotImported::Driver(device, error))?;
        self.is_plain = true;
        Ok(())
    }

    /// Gives all of it back.
    ///
    /// # Errors
    /// The driver's; the rest stays.
    pub(crate) fn give_back(&mut self, driver: &dyn Driver) -> Result<()> {
        let device = self.device();
        if self.is_plain {
            driver.ipc_close(device, self.address)?;
            self.is_plain = false;
        }
        if self.mapped > 0 {
            driver.unmap(device, self.address, self.mapped)?;
            self.mapped = 0;
        }
        while let Some(&handle) = self.handles.last() {
            driver.physical_release(device, handle)?;
            self.handles.pop();
        }
        if self.reserved > 0 {
            driver.address_free(device, self.address, self.reserved)?;
            self.reserved = 0;
        }
        Ok(())
    }
}

struct Open {
    times: u64,
    import: Import,
}

/// The imports of a process.
#[derive(Default)]
pub(crate) struct Imports {
    /// By address.
    open: BTreeMap<u64, Open>,
    /// Their addresses.
    named: HashMap<Key, u64>,
    /// What is to be given back.
    remains: Vec<Import>,
}

impl Imports {
    /// The address of memory that is open already, now once more, or that is still whole.
    pub(crate) fn open_again(&mut self, key: &Key) -> Option<u64> {
        if let Some(address) = self.named.get(key) {
            self.open.get_mut(address)?.times += 1;
            return Some(*address);
        }
        let whole = |import: &Import| import.is_used && import.key == *key;
        let at = self.remains.iter().position(whole)?;
        let import = self.remains.swap_remove(at);
        Some(self.open(import))
    }

    /// Adds an open import; its address.
    pub(crate) fn open(&mut self, import: Import) -> u64 {
        let address = import.address;
        self.named.insert(import.key.clone(), address);
        self.open.insert(address, Open { times: 1, import: Import { is_used: true, ..import } });
        address
    }

    /// Closes the import at `address` once; with the last time it is to be given back. False: none
    /// is open there.
    pub(crate) fn close(&mut self, address: u64) -> bool {
        let Some(open) = self.open.get_mut(&address) else { return false };
        open.times -= 1;
        if open.times == 0
            && let Some(Open { import, .. }) = self.open.remove(&address)
        {
            self.named.remove(&import.key);
            self.remains.push(import);
        }
        true
    }

    /// What is to be given back; the caller returns what it could not give back
    /// ([`Imports::keep`]).
    pub(crate) fn take_remains(&mut self) -> Vec<Import> {
        std::mem::take(&mut self.remains)
    }

    /// Keeps what could not be given back.
    pub(crate) fn keep(&mut self, remains: Vec<Import>) {
        self.remains.extend(remains);
    }

    /// The open imports of a device.
    pub(crate) fn of(&self, device: DeviceId) -> impl Iterator<Item = &Import> {
        self.open.values().map(|open| &open.import).filter(move |import| import.device() == device)
    }

    /// Number of imports that are open, and of those to be given back.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.open.len(), self.remains.len())
    }
}
