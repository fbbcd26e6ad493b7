//! The GPUs that a kernel is compiled for, from the "fat binary" that nvcc puts into a library and
//! the library registers when loaded. Code compiled for some generations asks which of them serves
//! the device (CUB chooses its tuning by it). That need not be the device's own: an RTX 4090 (8.9)
//! runs code for 8.6.
//!
//! The wrapper is `__fatBinC_Wrapper_t` of CUDA's `fatbinary_section.h`. NVIDIA does not document
//! its target: a header (magic number, version, its size, the size of the rest), then entries, each
//! with its kind, the sizes of its head and its body, and at byte 28 the number of its generation.
//! Under this reading, each of the 444 fat binaries of torch 2.11 parses to its end, with the
//! generations that torch names.

use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const MAGIC: u32 = 0xba55_ed50;
const HEADER_BYTES: usize = 16;
const LEAST_ENTRY_BYTES: usize = 32;
/// PTX, which serves every later generation; other kinds are code for one generation.
const PTX: u16 = 1;

#[repr(C)]
pub struct Wrapper {
    magic: u32,
    version: u32,
    data: *const u8,
    filename_or_fatbins: *const u8,
}

/// Kernels by the addresses of their host stubs, each with the address of its wrapper. Written
/// while libraries are loaded, seldom read.
static REGISTERED: Mutex<Registered> =
    Mutex::new(Registered { functions: Vec::new(), gone: Vec::new() });

struct Registered {
    functions: Vec<(usize, usize)>,
    /// Wrappers of unloaded libraries.
    gone: Vec<usize>,
}

fn registered() -> MutexGuard<'static, Registered> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a library's kernels.
pub fn register(wrapper: usize) {
    registered().gone.retain(|&gone| gone != wrapper);
}

/// A library is unloaded.
pub fn unregister(wrapper: usize) {
    registered().gone.push(wrapper);
}

/// Registers one kernel of a library.
pub fn register_function(wrapper: usize, stub: usize) {
    registered().functions.push((stub, wrapper));
}

/// The generation (86 for 8.6) whose code of a kernel serves a device of generation `device`;
/// `device` if the kernel is unknown.
pub fn serving(stub: usize, device: i32) -> i32 {
    let registered = registered();
    let of_it = registered.functions.iter().rev().find(|(function, _)| *function == stub);
    let Some(&(_, wrapper)) = of_it.filter(|(_, wrapper)| !registered.gone.contains(wrapper))
    else {
        return device;
    };
    // SAFETY: a loaded library registered it.
    let entries = unsafe { entries(wrapper as *const Wrapper) };
    chosen(&entries, device)
}

/// The first if none serves: no kernel runs here, and the caller has to go on.
fn chosen(entries: &[(u16, i32)], device: i32) -> i32 {
    let serves = |&&(kind, number): &&(u16, i32)| {
        number <= device && (kind == PTX || number / 10 == device / 10)
    };
    // Code before PTX.
    let best = entries.iter().filter(serves).max_by_key(|(kind, number)| (*kind != PTX, *number));
    best.or(entries.first()).map_or(device, |(_, number)| *number)
}

/// Kind and generation of each entry; empty for an unknown format.
///
/// # Safety
/// `wrapper` was registered by a loaded library.
unsafe fn entries(wrapper: *const Wrapper) -> Vec<(u16, i32)> {
    // SAFETY: the caller's promise; a library's data lies where it was linked.
    let Some(wrapper) = (unsafe { wrapper.as_ref() }) else { return Vec::new() };
    if wrapper.magic != WRAPPER_MAGIC || wrapper.data.is_null() {
        return Vec::new();
    }
    // SAFETY: the wrapper points at a fat binary, which has a header.
    let header = unsafe { slice::from_raw_parts(wrapper.data, HEADER_BYTES) };
    let length = u64_at(header, 8).and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
    if u32_at(header, 0) != Some(MAGIC) || u16_at(header, 6) != Some(HEADER_BYTES as u16) {
        return Vec::new();
    }
    // SAFETY: as many bytes follow, the header says.
    parse(unsafe { slice::from_raw_parts(wrapper.data.add(HEADER_BYTES), length) })
}

/// The entries behind the header.
fn parse(mut rest: &[u8]) -> Vec<(u16, i32)> {
    let mut found = Vec::new();
    while rest.len() >= LEAST_ENTRY_BYTES {
        let entry = (u16_at(rest, 0), u32_at(rest, 4), u64_at(rest, 8), u32_at(rest, 28));
        let (Some(kind), Some(head), Some(body), Some(number)) = entry else { break };
        found.push((kind, number as i32));
        let bytes = usize::try_from(body).ok().and_then(|body| body.checked_add(head as usize));
        match bytes.filter(|&bytes| bytes > 0).and_then(|bytes| rest.get(bytes..)) {
            Some(next) => rest = next,
            None => break,
        }
    }
    found
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELF: u16 = 2;

    /// A fat binary's entries as nvcc writes them, each with a body of as many bytes as its number.
    fn written(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(kind, number) in entries {
            let mut head = [0; 64];
            head[..2].copy_from_slice(&kind.to_le_bytes());
            head[4..8].copy_from_slice(&64u32.to_le_bytes());
            head[8..16].copy_from_slice(&u64::from(number).to_le_bytes());
            head[28..32].copy_from_slice(&number.to_le_bytes());
            bytes.extend(head);
            bytes.extend(vec![0xee; number as usize]);
        }
        bytes
    }

    #[test]
    fn the_code_that_serves_is_the_latest_of_the_devices_generation_that_is_not_later() {
        let bytes = written(&[(2, 75), (2, 80), (2, 86), (2, 90), (2, 120), (PTX, 120)]);
        let entries = parse(&bytes);
        assert_eq!(entries.len(), 6);
        let serving = [75, 80, 86, 87, 89, 90, 120, 121].map(|device| chosen(&entries, device));
        assert_eq!(serving, [75, 80, 86, 86, 86, 90, 120, 120]);
    }

    #[test]
    fn ptx_serves_later_generations_and_without_any_the_first_is_told() {
        assert_eq!(chosen(&[(ELF, 80), (PTX, 90)], 100), 90);
        assert_eq!(chosen(&[(ELF, 80), (PTX, 80)], 86), 80);
        assert_eq!(chosen(&[(ELF, 80), (ELF, 90)], 70), 80);
        assert_eq!(chosen(&[], 70), 70);
    }

    #[test]
    fn what_is_cut_or_no_fat_binary_is_read_as_far_as_it_goes() {
        let bytes = written(&[(ELF, 80), (ELF, 90)]);
        assert_eq!(parse(&bytes[..bytes.len() - 1]), [(ELF, 80), (ELF, 90)]);
        assert_eq!(parse(&bytes[..200]), [(ELF, 80), (ELF, 90)]);
        assert_eq!(parse(&bytes[..100]), [(ELF, 80)]);
        assert_eq!(parse(&[0; 64]), [(0, 0)]);
        let no_fatbin = Wrapper {
            magic: 7,
            version: 1,
            data: bytes.as_ptr(),
            filename_or_fatbins: std::ptr::null(),
        };
        // SAFETY: a wrapper that lives.
        assert!(unsafe { entries(&no_fatbin) }.is_empty());
    }
}
