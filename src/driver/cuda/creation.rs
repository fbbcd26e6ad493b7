//! The properties of new physical memory: a device's claims, each tried once.
//!
//! Memory created without a handle type can never leave the process, and NCCL, which exports the
//! memory that it registers, ends the program over it (`p2p.cc`); torch asks for a POSIX file
//! descriptor on every segment. Memory that a NIC accesses needs such properties too. Devices have
//! claimed both, and then refused: an export where no fabric channel is set up, access to memory
//! for RDMA under WSL2 before driver R615 (pytorch/pytorch#192330). So the first creation on a
//! device is tried whole, with one granule: create, export, map, access; a property that fails is
//! left out from then on.

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{self, CUmemAllocationHandleType as Raw};

use super::super::{DriverError, ErrorKind, Result};
use super::symbols::Symbols;
use super::{NOT_READY, device, length};

/// How physical memory can be exported to other processes (`handle_type:`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandleType {
    /// [`HandleType::Posix`] where the device offers it.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// As a POSIX file descriptor: to processes of this machine.
    Posix,
    /// As a fabric handle: to those of other machines too, over multi-node NVLink.
    Fabric,
}

impl HandleType {
    /// The value in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
            Self::Posix => "posix",
            Self::Fabric => "fabric",
        }
    }
}

/// `CU_MEM_HANDLE_TYPE_FABRIC`, newer (CUDA 12.3) than the bindings that we build against.
const FABRIC: Raw = Raw(8);
/// `CU_IPC_HANDLE_SIZE`: bytes of a `CUmemFabricHandle`.
const FABRIC_HANDLE: usize = 64;

/// The properties of a device's new memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Creation {
    pub(super) handle_type: Raw,
    pub(super) rdma: bool,
}

/// A device's claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) device: sys::CUdevice,
    pub(super) granularity: u64,
    pub(super) posix: bool,
    pub(super) rdma: bool,
}

impl Offer {
    /// The properties worth a try, the best first; the last asks for nothing.
    fn candidates(&self, wish: HandleType) -> Vec<Creation> {
        let kind = match wish {
            HandleType::Auto | HandleType::Posix if self.posix => {
                Raw::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            }
            // The bindings lack the attribute that would say whether the device has them: the
            // attempt decides.
            HandleType::Fabric => FABRIC,
            _ => Raw::CU_MEM_HANDLE_TYPE_NONE,
        };
        let none = Raw::CU_MEM_HANDLE_TYPE_NONE;
        let types = if kind == none { vec![none] } else { vec![kind, none] };
        let rdma = if self.rdma { vec![true, false] } else { vec![false] };
        let ways = types
            .iter()
            .flat_map(|&handle_type| rdma.iter().map(move |&rdma| Creation { handle_type, rdma }));
        ways.collect()
    }

    /// The first properties that work. The device's context must be current.
    ///
    /// # Errors
    /// There is no memory for the attempt (try again later), or no later call can succeed.
    pub(super) fn choose(&self, symbols: &Symbols, wish: HandleType) -> Result<Creation> {
        let candidates = self.candidates(wish);
        let plain = Creation { handle_type: Raw::CU_MEM_HANDLE_TYPE_NONE, rdma: false };
        let mut failure = None;
        let mut chosen = plain;
        for candidate in candidates {
            match self.attempt(symbols, candidate) {
                Ok(()) => {
                    chosen = candidate;
                    break;
                }
                Err(error) if error.is_out_of_memory() || error.is_final() => return Err(error),
                Err(error) => failure = failure.or(Some((candidate, error))),
            }
        }
        self.tell(wish, chosen, failure);
        Ok(chosen)
    }

    /// Logs a wish of the user's, or a claim of the device's, that does not work.
    fn tell(&self, wish: HandleType, chosen: Creation, failure: Option<(Creation, DriverError)>) {
        let why = failure.map(|(_, error)| format!(": {error}")).unwrap_or_default();
        if matches!(wish, HandleType::Posix | HandleType::Fabric)
            && chosen.handle_type == Raw::CU_MEM_HANDLE_TYPE_NONE
        {
            log::warn!(
                "handle_type:{} was requested, but device {} does not support it{why}; its memory \
                 cannot be shared with other processes",
                wish.name(),
                self.device
            );
        } else if let Some((tried, error)) = failure
            && tried.handle_type != chosen.handle_type
        {
            log::info!(
                "device {} claims that its memory can be exported, but it cannot: {error}",
                self.device
            );
        }
        if self.rdma && !chosen.rdma {
            log::info!(
                "device {} claims to support memory for RDMA, but cannot create it{why}",
                self.device
            );
        }
    }

    /// Creates, exports and maps one granule, and takes it back.
    fn attempt(&self, symbols: &Symbols, creation: Creation) -> Result<()> {
        let bytes = length(self.granularity);
        let properties = device::physical_properties(self.device, creation);
        let mut handle = 0;
        // SAFETY: reads `properties`, writes one handle.
        unsafe { symbols.cuMemCreate(&mut handle, bytes, &properties, 0) }?;
        let result = export(symbols, handle, creation.handle_type)
            .and_then(|()| self.access(symbols, handle));
        // SAFETY: the handle is ours, and nothing is mapped.
        let released = unsafe { symbols.cuMemRelease(handle) };
        result.and(released)
    }

    fn access(&self, symbols: &Symbols, handle: sys::CUmemGenericAllocationHandle) -> Result<()> {
        let bytes = length(self.granularity);
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { symbols.cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }?;
        // SAFETY: the range is reserved, ours, and as long as the handle's memory.
        let mapped = unsafe { symbols.cuMemMap(address, bytes, 0, handle, 0) };
        let result = mapped.and_then(|()| {
            let access = set_access(symbols, address, bytes, &[device::access(self.device)]);
            // SAFETY: it was mapped above, and nothing has used it.
            let unmapped = unsafe { symbols.cuMemUnmap(address, bytes) };
            access.and(unmapped)
        });
        // SAFETY: it was reserved above.
        let freed = unsafe { symbols.cuMemAddressFree(address, bytes) };
        result.and(freed)
    }
}

/// Exports a handle as NCCL would, and drops the result.
fn export(symbols: &Symbols, handle: sys::CUmemGenericAllocationHandle, kind: Raw) -> Result<()> {
    match kind {
        Raw::CU_MEM_HANDLE_TYPE_NONE => Ok(()),
        Raw::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => export_file(symbols, handle).map(drop),
        _ => {
            let mut exported = [0u8; FABRIC_HANDLE];
            let out: *mut c_void = exported.as_mut_ptr().cast();
            // SAFETY: writes as many bytes as a fabric handle has.
            unsafe { symbols.cuMemExportToShareableHandle(out, handle, kind, 0) }
        }
    }
}

/// Opens a file through which other processes import the handle's memory.
pub(super) fn export_file(
    symbols: &Symbols,
    handle: sys::CUmemGenericAllocationHandle,
) -> Result<OwnedFd> {
    let kind = Raw::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let mut file: RawFd = -1;
    // SAFETY: writes one int.
    unsafe { symbols.cuMemExportToShareableHandle((&raw mut file).cast(), handle, kind, 0) }?;
    if file < 0 {
        return Err(DriverError::new("cuMemExportToShareableHandle", ErrorKind::Other, 0));
    }
    // SAFETY: the driver has just opened it for us, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Attempts to set access. The driver was not ready while other threads launched
/// (comfy-aimdo#100); llama.cpp's forks try 100 times too.
const ATTEMPTS: u32 = 100;
/// The longest wait between two of them, microseconds: a tenth of a second in all.
const LONGEST_WAIT: u64 = 1_000;

/// `cuMemSetAccess`, repeated where the driver is not ready for it.
pub(super) fn set_access(
    symbols: &Symbols,
    address: sys::CUdeviceptr,
    bytes: usize,
    access: &[sys::CUmemAccessDesc],
) -> Result<()> {
    let mut attempt = 0;
    loop {
        // SAFETY: `access.len()` descriptors are read. The driver checks the range.
        let result =
            unsafe { symbols.cuMemSetAccess(address, bytes, access.as_ptr(), access.len()) };
        attempt += 1;
        match result {
            Err(error) if error.code == NOT_READY && attempt < ATTEMPTS => {
                std::thread::sleep(std::time::Duration::from_micros(
                    (10 << attempt.min(10)).min(LONGEST_WAIT),
                ));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ways(posix: bool, rdma: bool, wish: HandleType) -> Vec<(u32, bool)> {
        let offer = Offer { device: 0, granularity: 2 << 20, posix, rdma };
        offer.candidates(wish).into_iter().map(|way| (way.handle_type.0, way.rdma)).collect()
    }

    #[test]
    fn the_best_is_tried_first_and_nothing_special_last() {
        assert_eq!(
            ways(true, true, HandleType::Auto),
            [(1, true), (1, false), (0, true), (0, false)]
        );
        assert_eq!(ways(true, false, HandleType::Fabric), [(8, false), (0, false)]);
        assert_eq!(ways(false, true, HandleType::Posix), [(0, true), (0, false)]);
        assert_eq!(ways(true, false, HandleType::None), [(0, false)]);
        assert_eq!(ways(false, false, HandleType::Auto), [(0, false)]);
    }
}
