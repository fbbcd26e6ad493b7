//! Memory of other processes: handles of plain allocations, as bytes that may travel.
//!
//! A handle names the whole allocation that holds the address, and the process that exported it. To
//! open it in another process of a phantom gives fresh memory of the same size there, since no two
//! processes share device memory here: what is checked is who may export, open and close, and how
//! often; not what is in it.

use crate::abi::{Answer, Out, code, driver, runtime};
use crate::context::{driver_device, runtime_device};
use crate::gpu::{failed, gpu};
use gruyere_phantom::Source;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `cudaIpcMemHandle_t` and `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemHandle {
    mark: [u8; 16],
    pid: u64,
    device: u64,
    address: u64,
    bytes: u64,
    rest: [u64; 2],
}

const MARK: [u8; 16] = *b"phantom memory\0\0";

/// What this process has opened: by handle, the address here and how often.
static OPENED: Mutex<BTreeMap<MemHandle, (u64, u32)>> = Mutex::new(BTreeMap::new());

fn opened() -> MutexGuard<'static, BTreeMap<MemHandle, (u64, u32)>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Neither mappings nor a pool's memory have handles of this kind, nor has memory that is another
/// process's.
fn export(out: Out<MemHandle>, address: u64) -> Answer {
    let whole = gpu().sim.allocation(address).ok_or(code::INVALID_VALUE)?;
    let imported = opened().values().any(|&(start, _)| start == whole.address);
    if whole.source != Source::Plain || imported {
        return Err(code::INVALID_VALUE);
    }
    out.put(MemHandle {
        mark: MARK,
        pid: u64::from(std::process::id()),
        device: u64::from(whole.device),
        address: whole.address,
        bytes: whole.bytes,
        rest: [0; 2],
    })
}

fn open(out: Out<u64>, handle: MemHandle, device: u32) -> Answer {
    if handle.mark != MARK {
        return Err(code::INVALID_VALUE);
    }
    // The exporter has it already.
    if handle.pid == u64::from(std::process::id()) {
        return Err(code::INVALID_CONTEXT);
    }
    let mut opened = opened();
    if let Some((address, times)) = opened.get_mut(&handle) {
        *times += 1;
        return out.put(*address);
    }
    let address = gpu().sim.alloc(device, handle.bytes).map_err(failed)?;
    opened.insert(handle, (address, 1));
    out.put(address)
}

fn close(address: u64) -> Answer {
    let mut opened = opened();
    let (&handle, (_, times)) =
        opened.iter_mut().find(|(_, (start, _))| *start == address).ok_or(code::INVALID_VALUE)?;
    *times -= 1;
    if *times == 0 {
        opened.remove(&handle);
        let device = gpu().device_of_address(address).unwrap_or(0);
        gpu().sim.free(device, address).map_err(failed)?;
    }
    Ok(())
}

runtime! {
    fn cudaIpcGetMemHandle(out: Out<MemHandle>, address: u64) { export(out, address) }
    fn cudaIpcOpenMemHandle(out: Out<u64>, handle: MemHandle, _flags: u32) {
        open(out, handle, runtime_device())
    }
    fn cudaIpcCloseMemHandle(address: u64) { close(address) }
}

driver! {
    fn cuIpcGetMemHandle(out: Out<MemHandle>, address: u64) { export(out, address) }
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: MemHandle, _flags: u32) {
        open(out, handle, driver_device()?)
    }
    fn cuIpcCloseMemHandle(address: u64) { close(address) }
}
