//! Blocks that other processes map.
//!
//! Pages under a live block stay where they are, so other processes may map its chunks, whole and
//! in the order of their addresses, for as long as the block lives. A chunk holds other blocks too,
//! as a segment of torch's does.
//!
//! An [`Extent`] stands for the chunks under a block. It has the number of the newest mapping among
//! them: should the block be freed, and other chunks be mapped at its addresses, the number is a
//! higher one. So equal extents of a process are the same memory, and an outdated one is refused.

use crate::central::Central;
use crate::driver::{DeviceId, Driver, DriverError, IpcHandle};
use crate::heap::Heap;
use crate::path::block_at::BlockFacts;
use crate::runs::page_table::Owner;
use crate::sharing::foreign::ChunkFile;
use crate::supply::pages::chunks::Mapping;
use crate::sync::lock;
use std::fmt;
use std::ops::Range;

/// Consecutive chunks of a device, as mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The device.
    pub device: DeviceId,
    /// The first chunk's address.
    pub address: u64,
    /// The bytes of all chunks.
    pub bytes: u64,
    /// The number of the newest mapping among them.
    pub newest: u64,
}

/// The memory that a block lies in, as other processes can open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// Chunks, to be mapped in their order ([`Heap::export_chunks`]).
    Chunks(Extent),
    /// A plain allocation that starts at this address.
    Plain(u64, IpcHandle),
}

impl Export {
    /// The address in this process of what another one opens.
    pub fn address(&self) -> u64 {
        match *self {
            Self::Chunks(Extent { address, .. }) | Self::Plain(address, _) => address,
        }
    }
}

/// Why memory is not offered to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotExported {
    /// No live block starts at the address.
    NoBlock(u64),
    /// The block lies in a pool of the driver's.
    InPool,
    /// The block lies in a segment that a caller brought, of which only the caller knows what it is
    /// a part of.
    Brought,
    /// The extent is not mapped any more.
    Outdated,
    /// The driver exports no chunk as a file.
    NoFiles(DriverError),
    /// The driver refused.
    Driver(DriverError),
}

impl fmt::Display for NotExported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBlock(address) => write!(
                f,
                "no live block of Gruyère's starts at {address:#x} (the memory is another \
                 allocator's, or was freed)"
            ),
            Self::InPool => f.write_str(
                "the memory is a pool's of the driver (backing:pool), which has no handles for \
                 other processes; GRUYERE_CONF=backing:fixed has them",
            ),
            Self::Brought => f.write_str(
                "the memory is a MemPool's (torch.cuda.use_mem_pool); allocate the tensor outside \
                 of it",
            ),
            Self::Outdated => f.write_str("the memory was freed before it was opened"),
            Self::NoFiles(error) => write!(
                f,
                "the CUDA driver opens no file for it: {error} (GRUYERE_CONF has handle_type:none \
                 or handle_type:fabric, or its process has no open files left: ulimit -n)"
            ),
            Self::Driver(error) => write!(f, "the CUDA driver refused: {error}"),
        }
    }
}

impl Heap {
    /// How other processes can open the memory of the live block that starts at `address`.
    ///
    /// # Errors
    /// [`NotExported`], but for `Outdated`.
    pub fn export(&self, address: u64) -> Result<Export, NotExported> {
        let owner = self.shared.table.get(address);
        let known = match owner {
            Owner::Slab { device, .. } | Owner::Large { device, .. } => Some(device),
            Owner::None => None,
        };
        let device = self.devices().find(|device| {
            known.map_or_else(
                || lock(&device.central).is_direct(address),
                |known| device.id == known,
            )
        });
        let device = device.ok_or(NotExported::NoBlock(address))?;
        let block = device.block_at(address, owner).filter(|block| !block.is_pending);
        let BlockFacts { bytes, .. } = block.ok_or(NotExported::NoBlock(address))?;
        let export = lock(&device.central).export(&*self.shared.driver, address, bytes)?;
        device.mark_sent(address, owner);
        Ok(export)
    }

    /// Files of up to `most` chunks of an extent, with their bytes: those from the address `from`
    /// on, in their order.
    ///
    /// # Errors
    /// [`NotExported::Outdated`], [`NotExported::NoFiles`].
    pub fn export_chunks(
        &self,
        extent: Extent,
        from: u64,
        most: usize,
    ) -> Result<Vec<ChunkFile>, NotExported> {
        let device = self.device_in_use(extent.device.into()).ok().flatten();
        let central = lock(&device.ok_or(NotExported::Outdated)?.central);
        if !central.is_mapped(extent) {
            return Err(NotExported::Outdated);
        }
        let chunks = central.backing.pages.mappings(&(from..extent.address + extent.bytes));
        chunks.take(most).map(|chunk| central.file_of(&*self.shared.driver, chunk)).collect()
    }
}

impl Central {
    fn export(&self, driver: &dyn Driver, address: u64, bytes: u64) -> Result<Export, NotExported> {
        let plain = |start| {
            let handle = driver.ipc_handle(self.device, start).map_err(NotExported::Driver)?;
            Ok(Export::Plain(start, handle))
        };
        if self.is_direct(address) {
            return plain(address);
        }
        let range = address..address + bytes;
        if let Some(first) = self.backing.pages.mappings(&range).next() {
            // Now, while the sender can still be told.
            self.file_of(driver, first)?;
            return self.extent(range).map(Export::Chunks).ok_or(NotExported::NoBlock(address));
        }
        let region = self.arenas.region_at(address).ok_or(NotExported::NoBlock(address))?;
        let pool = self.pools.of_space(region.space);
        if pool.is_some_and(|pool| pool.is_outside()) {
            return Err(NotExported::Brought);
        }
        let (origin, taken) = region.span;
        if self.backing.is_pooled(taken) { Err(NotExported::InPool) } else { plain(origin) }
    }

    /// Whether an extent is mapped as it was when it was exported.
    fn is_mapped(&self, exported: Extent) -> bool {
        let range = exported.address..exported.address.saturating_add(exported.bytes);
        self.extent(range) == Some(exported)
    }

    /// The extent of the mappings that touch a range; `None`: there is none, or a gap.
    fn extent(&self, range: Range<u64>) -> Option<Extent> {
        let mut extent: Option<Extent> = None;
        for Mapping { address, bytes, number, .. } in self.backing.pages.mappings(&range) {
            extent = Some(match extent {
                None => Extent { device: self.device, address, bytes, newest: number },
                Some(before) if before.address + before.bytes == address => {
                    let newest = before.newest.max(number);
                    Extent { bytes: before.bytes + bytes, newest, ..before }
                }
                Some(_) => return None,
            });
        }
        extent
    }

    fn file_of(&self, driver: &dyn Driver, chunk: Mapping) -> Result<ChunkFile, NotExported> {
        let file = driver.physical_export(self.device, chunk.handle);
        Ok((file.map_err(NotExported::NoFiles)?, chunk.bytes))
    }
}
