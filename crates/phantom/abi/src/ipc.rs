//! Memory and events of other processes: handles of plain allocations and of events, as bytes to
//! send.
//!
//! A handle names the whole allocation at the address, and the exporting process. Opening it in
//! another process on the simulator gives fresh memory of the same size, since processes share no
//! device memory here: the simulator checks the rules of export, open and close, and their counts,
//! not the contents.

use crate::abi::{Answer, Out, code};
use crate::call_log::{by_value, large};
use crate::context::{driver_device, runtime_device};
use crate::entry::{driver, runtime};
use crate::gpu::{failed, gpu};
use gruyere_phantom::Source;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

by_value! { MemHandle }
large! { MemHandle }
by_value! { EventName }
large! { EventName }

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

/// `cudaIpcEventHandle_t` and `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EventName {
    mark: [u8; 16],
    pid: u64,
    event: u64,
    rest: [u64; 4],
}

const EVENT_MARK: [u8; 16] = *b"phantom event\0\0\0";

fn name_event(out: Out<EventName>, event: usize) -> Answer {
    // An event that does not exist has no name.
    gpu().sim.event_query(0, event).map_err(failed)?;
    out.put(EventName {
        mark: EVENT_MARK,
        pid: u64::from(std::process::id()),
        event: event as u64,
        rest: [0; 4],
    })
}

fn open_event(out: Out<usize>, name: EventName, device: u32) -> Answer {
    if name.mark != EVENT_MARK {
        return Err(code::INVALID_VALUE);
    }
    // The process that made the event has it already.
    if name.pid == u64::from(std::process::id()) {
        return Err(code::INVALID_CONTEXT);
    }
    out.put(gpu().sim.event_create(device).map_err(failed)?)
}

const MARK: [u8; 16] = *b"phantom memory\0\0";

/// Handles opened by this process, with the address here and a count.
static OPENED: Mutex<BTreeMap<MemHandle, (u64, u32)>> = Mutex::new(BTreeMap::new());

fn opened() -> MutexGuard<'static, BTreeMap<MemHandle, (u64, u32)>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mappings, pool memory and another process's memory have no such handles.
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
    // The exporter cannot open its own handle.
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
    fn cudaIpcGetEventHandle(out: Out<EventName>, event: usize) { name_event(out, event) }
    fn cudaIpcOpenEventHandle(out: Out<usize>, name: EventName) {
        open_event(out, name, runtime_device())
    }
}

driver! {
    fn cuIpcGetMemHandle(out: Out<MemHandle>, address: u64) { export(out, address) }
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: MemHandle, _flags: u32) {
        open(out, handle, driver_device()?)
    }
    fn cuIpcCloseMemHandle(address: u64) { close(address) }
    fn cuIpcGetEventHandle(out: Out<EventName>, event: usize) { name_event(out, event) }
    fn cuIpcOpenEventHandle(out: Out<usize>, name: EventName) {
        open_event(out, name, driver_device()?)
    }
}
