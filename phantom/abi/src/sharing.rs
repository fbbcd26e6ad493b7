//! What physical memory was asked to be: whether it can leave the process, and whether a NIC may
//! reach it.

use crate::abi::code;
use crate::numbers::{CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The kinds of shareable handle that the devices say they have (`PHANTOM_HANDLE_TYPES`).
#[derive(Clone, Copy, Debug)]
pub struct HandleTypes {
    /// A mask of `CUmemAllocationHandleType`.
    pub offered: u32,
    /// An export is refused all the same, as that of a fabric handle is where no channel is set up
    /// (IMEX).
    pub refused: bool,
}

impl HandleTypes {
    /// From `posix,fabric`, `none`, and `refused` beside them.
    pub fn parse(text: &str) -> Option<Self> {
        let mut types = Self { offered: 0, refused: false };
        for word in text.split(',').map(str::trim) {
            match word {
                "none" => {}
                "posix" => types.offered |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32,
                "fabric" => types.offered |= CU_MEM_HANDLE_TYPE_FABRIC as u32,
                "refused" => types.refused = true,
                _ => return None,
            }
        }
        Some(types)
    }
}

/// What becomes of the wish that a NIC may reach the memory (`PHANTOM_RDMA`). Seen on hardware: a
/// device that says it can, and where access to such memory is refused (WSL2 before driver R615:
/// pytorch/pytorch#192330).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rdma {
    /// The devices can do it.
    Works,
    /// They say that they can't.
    Missing,
    /// They say that they can, and `cuMemCreate` refuses.
    Refused,
    /// They say that they can, and `cuMemSetAccess` refuses.
    WithoutAccess,
}

impl Rdma {
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "works" => Some(Self::Works),
            "missing" => Some(Self::Missing),
            "refused" => Some(Self::Refused),
            "without-access" => Some(Self::WithoutAccess),
            _ => None,
        }
    }
}

/// What a handle was created as.
#[derive(Clone, Copy, Debug, Default)]
pub struct Creation {
    /// The mask of `requestedHandleTypes`.
    pub handle_types: u32,
    /// `gpuDirectRDMACapable`.
    pub rdma: bool,
}

/// By handle. A handle that was given up stays: its memory may still be mapped.
static CREATED: Mutex<Option<HashMap<u64, Creation>>> = Mutex::new(None);

/// Notes what `handle` was created as.
pub fn note(handle: u64, creation: Creation) {
    let mut created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    created.get_or_insert_default().insert(handle, creation);
}

/// What `handle` was created as.
pub fn of(handle: u64) -> Result<Creation, u32> {
    let created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    created.as_ref().and_then(|created| created.get(&handle).copied()).ok_or(code::INVALID_VALUE)
}
