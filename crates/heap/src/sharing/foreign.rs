//! The books of other processes' memory that is mapped in this one.
//!
//! ```text
//!   import   -- all of it mapped -->  open, used once;  opened again -->  used once more
//!            -- a driver call fails -->  remains of it
//!   open     -- closed as often as opened -->  remains, which the device may still use
//!   remains  -- each driver call that gives them back succeeds -->  gone
//!            -- one fails, or a stream captures -->  kept, and tried again with each later import
//!                                                    and close
//! ```
//!
//! What is open here is held by the process that exported it, and counts there.

use crate::driver::{DeviceId, Driver, DriverError, IpcHandle, PhysicalHandle, Result};
use crate::error::Error;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::OwnedFd;

/// What an exporter sends: a chunk's file, and its bytes.
pub type Chunk = (OwnedFd, u64);

/// Returns the chunks of an import, one a call.
///
/// # Errors
/// Why the chunk did not come.
pub type NextChunk<'a> = &'a mut dyn FnMut() -> std::result::Result<Chunk, String>;

/// Why another process's memory was not opened.
#[derive(Debug)]
pub enum NotImported {
    /// The chunks did not come: why.
    Sender(String),
    /// The driver refused.
    Driver(DriverError),
    /// The device cannot be used.
    Device(Error),
}

impl From<DriverError> for NotImported {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl fmt::Display for NotImported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sender(why) => f.write_str(why),
            Self::Driver(error) => write!(f, "the CUDA driver refused to map it: {error}"),
            Self::Device(error) => error.fmt(f),
        }
    }
}

/// What an import has of the driver.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) device: DeviceId,
    address: u64,
    /// Bytes of address space; 0: none, since it is a plain allocation, or not any more.
    reserved: u64,
    /// Bytes mapped from `address` on.
    mapped: u64,
    /// Handles not yet released.
    handles: Vec<PhysicalHandle>,
    /// A plain allocation is open at `address`.
    is_plain: bool,
    /// Work may use the memory.
    pub(crate) is_used: bool,
}

impl Import {
    /// An import that has nothing yet.
    pub(crate) fn new(device: DeviceId) -> Self {
        let handles = Vec::new();
        Self {
            device,
            address: 0,
            reserved: 0,
            mapped: 0,
            handles,
            is_plain: false,
            is_used: false,
        }
    }

    /// Maps chunks one behind the other, `bytes` in all, for the device and its peers.
    ///
    /// # Errors
    /// The sender's or the driver's; give back what is there then.
    pub(crate) fn map(
        &mut self,
        driver: &dyn Driver,
        peers: &[DeviceId],
        bytes: u64,
        next: NextChunk<'_>,
    ) -> std::result::Result<(), NotImported> {
        self.address = driver.address_reserve(self.device, bytes, 0)?;
        self.reserved = bytes;
        while self.mapped < bytes {
            let (file, length) = next().map_err(NotImported::Sender)?;
            if length == 0 || length > bytes - self.mapped {
                return Err(NotImported::Sender("the sender's chunks have other lengths".into()));
            }
            let handle = driver.physical_import(self.device, file)?;
            self.handles.push(handle);
            driver.map(self.device, self.address + self.mapped, length, handle)?;
            self.mapped += length;
            // The mapping keeps the memory.
            driver.physical_release(self.device, handle)?;
            self.handles.pop();
        }
        let grant = |peers| driver.set_access(self.device, self.address, bytes, peers);
        // A refused peer must not keep the device from it.
        grant(peers).or_else(|error| if peers.is_empty() { Err(error) } else { grant(&[]) })?;
        Ok(())
    }

    /// Opens a plain allocation.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn open_plain(&mut self, driver: &dyn Driver, handle: IpcHandle) -> Result<()> {
        self.address = driver.ipc_open(self.device, handle)?;
        self.is_plain = true;
        Ok(())
    }

    /// Gives all of it back.
    ///
    /// # Errors
    /// The driver's; the rest stays.
    pub(crate) fn give_back(&mut self, driver: &dyn Driver) -> Result<()> {
        if self.is_plain {
            driver.ipc_close(self.device, self.address)?;
            self.is_plain = false;
        }
        if self.mapped > 0 {
            driver.unmap(self.device, self.address, self.mapped)?;
            self.mapped = 0;
        }
        while let Some(&handle) = self.handles.last() {
            driver.physical_release(self.device, handle)?;
            self.handles.pop();
        }
        if self.reserved > 0 {
            driver.address_free(self.device, self.address, self.reserved)?;
            self.reserved = 0;
        }
        Ok(())
    }
}

/// The device that uses an import, and the sender's name of the memory.
pub(crate) type Key = (DeviceId, Box<[u8]>);

struct Open {
    key: Key,
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
    pub(crate) remains: Vec<Import>,
}

impl Imports {
    /// The address of an import that is open already, now once more.
    pub(crate) fn open_again(&mut self, key: &Key) -> Option<u64> {
        let address = *self.named.get(key)?;
        self.open.get_mut(&address)?.times += 1;
        Some(address)
    }

    /// Adds an open import; its address.
    pub(crate) fn open(&mut self, key: Key, mut import: Import) -> u64 {
        let address = import.address;
        import.is_used = true;
        self.named.insert(key.clone(), address);
        self.open.insert(address, Open { key, times: 1, import });
        address
    }

    /// Closes the import at `address` once; with the last time it is to be given back. False: none
    /// is open there.
    pub(crate) fn close(&mut self, address: u64) -> bool {
        let Some(open) = self.open.get_mut(&address) else { return false };
        open.times -= 1;
        if open.times == 0
            && let Some(Open { key, import, .. }) = self.open.remove(&address)
        {
            self.named.remove(&key);
            self.remains.push(import);
        }
        true
    }

    /// Number of open imports.
    pub(crate) fn opened(&self) -> usize {
        self.open.len()
    }
}
