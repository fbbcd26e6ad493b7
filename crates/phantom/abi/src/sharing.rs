//! Requested properties of physical memory: whether it can be exported, and whether a NIC can
//! access it.

use crate::abi::code;
use crate::numbers::{CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The kinds of shareable handle that the devices report (`PHANTOM_HANDLE_TYPES`).
#[derive(Clone, Copy, Debug)]
pub struct HandleTypes {
    /// A mask of `CUmemAllocationHandleType`.
    pub offered: u32,
    /// Exports fail nevertheless, as those of fabric handles do without a channel (IMEX).
    pub refused: bool,
}

impl HandleTypes {
    /// Parses `posix,fabric` or `none`, each with an optional `refused`.
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

/// The result of requesting memory that a NIC can access (`PHANTOM_RDMA`). Seen on hardware: a
/// device that reports support but refuses access to such memory (WSL2 before driver R615:
/// pytorch/pytorch#192330).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rdma {
    /// The devices support it.
    Works,
    /// The devices report no support.
    Missing,
    /// The devices report support, but `cuMemCreate` fails.
    Refused,
    /// The devices report support, but `cuMemSetAccess` fails.
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

/// The properties that a handle was created with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Creation {
    /// The mask of `requestedHandleTypes`.
    pub handle_types: u32,
    /// `gpuDirectRDMACapable`.
    pub rdma: bool,
}

/// By handle. A released handle stays: its memory may still be mapped.
static CREATED: Mutex<Option<HashMap<u64, Creation>>> = Mutex::new(None);

/// Notes the properties of `handle`.
pub fn note(handle: u64, creation: Creation) {
    let mut created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    created.get_or_insert_default().insert(handle, creation);
}

/// The properties of `handle`.
pub fn of(handle: u64) -> Result<Creation, u32> {
    let created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    created.as_ref().and_then(|created| created.get(&handle).copied()).ok_or(code::INVALID_VALUE)
}
