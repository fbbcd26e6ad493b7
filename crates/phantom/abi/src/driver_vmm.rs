//! libcuda: virtual memory management.

use crate::abi::{Answer, In, Out, SomeResult, code};
use crate::contents::Contents;
use crate::context::driver_device;
use crate::driver_memory::{AccessDesc, Location};
use crate::entry::driver;
use crate::exports;
use crate::gpu::{failed, gpu};
use crate::numbers::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_FABRIC,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
};
use crate::sharing::{self, Creation, Rdma};
use gruyere_phantom::{SimResult, Source};

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    /// Pinned is the only kind.
    kind: u32,
    handle_types: u32,
    location: Location,
    metadata: usize,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProp {
    /// The requested properties; an error if the devices do not offer them.
    fn creation(&self) -> Result<Creation, u32> {
        let creation =
            Creation { handle_types: self.handle_types, rdma: self.gpu_direct_rdma != 0 };
        if creation.handle_types & !gpu().handle_types.offered != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        match gpu().rdma {
            Rdma::Missing | Rdma::Refused if creation.rdma => Err(code::NOT_SUPPORTED),
            _ => Ok(creation),
        }
    }
}

/// Repeats on the contents, if kept, a call's change to the books; undoes the call if the host
/// fails.
fn kept(change: impl FnOnce(&Contents) -> Answer, undo: impl FnOnce() -> SimResult<()>) -> Answer {
    let changed = gpu().contents.as_ref().map_or(Ok(()), change);
    if changed.is_err() {
        let _ = undo();
    }
    changed
}

driver! {
    fn cuMemGetAllocationGranularity(out: Out<usize>, prop: In<AllocationProp>, _option: u32) {
        let device = prop.get()?.location.device()?;
        out.put(gpu().sim.device_config(device).map_err(failed)?.granularity as usize)
    }

    fn cuMemAddressReserve(out: Out<u64>, bytes: usize, align: usize, _hint: u64, flags: u64) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let address = gpu().sim.address_reserve(0, bytes as u64, align as u64).map_err(failed)?;
        kept(
            |contents| contents.reserved(address, bytes),
            || gpu().sim.address_free(0, address, bytes as u64)
        )?;
        out.put(address)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        gpu().sim.address_free(0, address, bytes as u64).map_err(failed)?;
        gpu().contents.as_ref().map_or(Ok(()), |contents| contents.freed(address, bytes))
    }

    fn cuMemCreate(out: Out<u64>, bytes: usize, prop: In<AllocationProp>, _flags: u64) {
        let prop = prop.get()?;
        if prop.kind != CU_MEM_ALLOCATION_TYPE_PINNED {
            return Err(code::INVALID_VALUE);
        }
        let creation = prop.creation()?;
        let handle =
            gpu().sim.physical_create(prop.location.device()?, bytes as u64).map_err(failed)?;
        kept(|contents| contents.created(handle, bytes), || gpu().sim.physical_release(0, handle))?;
        sharing::note(handle, creation);
        out.put(handle)
    }

    /// Memory created without the type cannot be exported. A file is the memory's own where
    /// contents are kept, otherwise an empty one of its length; a fabric handle is 64 bytes.
    fn cuMemExportToShareableHandle(out: Out<SomeResult>, handle: u64, kind: u32, flags: u64) {
        let creation = sharing::of(handle)?;
        if flags != 0 || kind.count_ones() != 1 || creation.handle_types & kind == 0 {
            return Err(code::INVALID_VALUE);
        }
        if gpu().handle_types.refused {
            return Err(code::NOT_SUPPORTED);
        }
        if kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32 {
            let bytes = gpu().sim.physical_bytes(handle).ok_or(code::INVALID_VALUE)?;
            out.cast::<i32>().put(exports::file(gpu().contents.as_ref(), handle, bytes)?)
        } else if kind == CU_MEM_HANDLE_TYPE_FABRIC as u32 {
            out.cast::<[u8; 64]>().put([0; 64])
        } else {
            Err(code::NOT_SUPPORTED)
        }
    }

    /// The number of the file takes the place of a pointer.
    fn cuMemImportFromShareableHandle(out: Out<u64>, exported: usize, kind: u32) {
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32 {
            return Err(code::NOT_SUPPORTED);
        }
        let file = exports::reopened(exported)?;
        let bytes = exports::length(&file)?;
        let handle = gpu().sim.physical_import(driver_device()?, bytes).map_err(failed)?;
        if let Some(contents) = &gpu().contents {
            contents.imported(handle, file);
        }
        sharing::note(handle, Creation { handle_types: kind, rdma: false });
        out.put(handle)
    }

    fn cuMemRelease(handle: u64) {
        gpu().sim.physical_release(0, handle).map_err(failed)?;
        gpu().contents.iter().for_each(|contents| contents.released(handle));
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        gpu().sim.map(0, address, bytes as u64, offset as u64, handle).map_err(failed)?;
        kept(
            |contents| contents.mapped(address, bytes, handle),
            || gpu().sim.unmap(0, address, bytes as u64)
        )
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        gpu().sim.unmap(0, address, bytes as u64).map_err(failed)?;
        gpu().contents.as_ref().map_or(Ok(()), |contents| contents.unmapped(address, bytes))
    }

    fn cuMemSetAccess(address: u64, bytes: usize, descs: In<AccessDesc>, n: usize) {
        let mut devices = Vec::with_capacity(n);
        for i in 0..n {
            let desc = descs.nth(i)?;
            if desc.flags != 0 {
                devices.push(desc.location.device()?);
            }
        }
        if gpu().rdma == Rdma::WithoutAccess {
            let is_capable = |source| matches!(
                source,
                Source::Mapping(handle) if sharing::of(handle).is_ok_and(|created| created.rdma)
            );
            if gpu().sim
                .backing(address, bytes as u64)
                .into_iter()
                .any(|piece| is_capable(piece.source)) {
                return Err(code::NOT_SUPPORTED);
            }
        }
        gpu().sim.set_access(0, address, bytes as u64, &devices).map_err(failed)
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: u64) {
        let device = location.get()?.device()?;
        let backing = gpu().sim.backing(address, 1);
        let access = backing.first().ok_or(code::INVALID_VALUE)?.access;
        flags.put(if access & (1 << device) != 0 { 3 } else { 0 })
    }
}
