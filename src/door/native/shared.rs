//! Memory that processes share ([`crate::door`]'s `sharing`), for the shim.

use super::super::process::{GRUYERE_OK, current, guarded};
use super::super::{fork, sharing};
use super::{Failure, answered};
use std::ffi::{c_int, c_void};

/// A block's memory, as another process opens it.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereShared {
    /// The memory's name.
    pub name: [u8; 64],
    /// Length of the name in bytes.
    pub size: u32,
    /// Offset of the block in the memory, in bytes.
    pub offset: u64,
}

/// # Safety
/// `shared` is valid for writes.
pub(super) unsafe extern "C" fn share(pointer: *mut c_void, shared: *mut GruyereShared) -> c_int {
    answered(|heap| {
        let (bytes, offset) =
            sharing::name_of(heap, pointer as u64).map_err(|why| Failure::invalid(&why))?;
        let mut name = [0; 64];
        name[..bytes.len()].copy_from_slice(&bytes);
        // SAFETY: the caller's promise.
        unsafe { shared.write(GruyereShared { name, size: bytes.len() as u32, offset }) };
        Ok(GRUYERE_OK)
    })
}

/// # Safety
/// `size` bytes at `name` are readable.
pub(super) unsafe extern "C" fn open(name: *const u8, size: usize, device: c_int) -> *mut c_void {
    let mut address = 0;
    answered(|heap| {
        // SAFETY: the caller's promise.
        let name = unsafe { std::slice::from_raw_parts(name, size) };
        let device = u32::try_from(device).unwrap_or(u32::MAX);
        address = sharing::open(heap, device, name).map_err(|why| Failure::invalid(&why))?;
        Ok(GRUYERE_OK)
    });
    address as *mut c_void
}

pub(super) extern "C" fn close(address: *mut c_void) {
    if !fork::is_forked_child() {
        guarded(false, || current().is_some_and(|heap| heap.close_import(address as u64)));
    }
}
