//! `observe`: makes the real call with the caller's very arguments, leaves its result untouched,
//! and records its effect.
//!
//! Of CUDA it calls nothing else but cuCtxGetDevice, which makes no context.

use super::context;
use super::real::{AllocationProp, CuResult, DevicePtr, OUT_OF_MEMORY};
use crate::door::oom;
use crate::door::preload::observe::watching;
use crate::door::process::{current as heap_in_use, guarded};
use crate::driver::StreamHandle;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_ulonglong};

/// Records the `bytes` at `*out` where the real call returned 0, and a refusal for want of memory.
///
/// # Safety
/// `out` may be read where `code` is 0.
pub unsafe fn allocated(
    code: CuResult,
    out: *const DevicePtr,
    bytes: usize,
    stream: StreamHandle,
) -> CuResult {
    if code == 0 {
        // SAFETY: the caller's promise.
        let address = unsafe { *out };
        guarded((), || {
            if let Some(device) = context::device() {
                note(device, address, bytes, stream);
            }
        });
    } else if code == OUT_OF_MEMORY {
        guarded((), || {
            if let Some(device) = context::device()
                && let Some(heap) = watching()
            {
                oom::saw(heap, device, bytes as u64, stream);
            }
        });
    }
    code
}

fn note(device: i64, address: DevicePtr, bytes: usize, stream: StreamHandle) {
    if let Some(heap) = watching() {
        heap.saw_malloc(device, address, bytes as u64, stream);
    }
}

/// Records the coming free of the block at `address`: before the call, as another thread may get
/// the address at once.
pub fn freeing(address: DevicePtr, stream: StreamHandle) {
    if address != 0 {
        guarded((), || {
            if let Some(heap) = heap_in_use() {
                heap.saw_free(address, stream);
            }
        });
    }
}

/// Records the coming reset of the device: all blocks on it are gone.
pub fn resetting(device: c_int) {
    guarded((), || {
        if let Some(heap) = heap_in_use() {
            heap.reset_device(i64::from(device));
        }
    });
}

/// Pages that the program maps itself (torch's expandable segments, vLLM's sleep mode): a mapping
/// is a block. Pages mapped twice count twice; a range unmapped in pieces counts as unmapped whole:
/// the driver takes whole mappings only.
struct Pages {
    /// Devices of the created handles, by handle.
    devices: HashMap<c_ulonglong, i64>,
    /// Bytes of the mappings, by address.
    mapped: BTreeMap<DevicePtr, u64>,
}

static PAGES: Mutex<Option<Pages>> = Mutex::new(None);

fn with_pages<T>(body: impl FnOnce(&mut Pages) -> T) -> T {
    let mut pages = PAGES.lock();
    body(pages.get_or_insert_with(|| Pages { devices: HashMap::new(), mapped: BTreeMap::new() }))
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_A_DEVICE: u32 = 1;

/// Records created pages.
pub fn created(pages: c_ulonglong, properties: &AllocationProp) {
    if properties.location_kind == ON_A_DEVICE {
        guarded((), || {
            with_pages(|known| known.devices.insert(pages, i64::from(properties.location)));
        });
    }
}

/// Records a released handle; its pages live on while they are mapped.
pub fn releasing(pages: c_ulonglong) {
    guarded((), || {
        with_pages(|known| known.devices.remove(&pages));
    });
}

/// Records mapped pages, but for the host's and those that another process exported.
pub fn mapped(address: DevicePtr, bytes: usize, pages: c_ulonglong) {
    guarded((), || {
        let device = with_pages(|known| {
            let device = known.devices.get(&pages).copied()?;
            known.mapped.insert(address, bytes as u64);
            Some(device)
        });
        if let Some(device) = device {
            note(device, address, bytes, StreamHandle::ALL_STREAMS);
        }
    });
}

/// Records the coming unmapping of a range, which may hold several mappings.
pub fn unmapping(address: DevicePtr, bytes: usize) {
    guarded((), || {
        let end = address.saturating_add(bytes as u64);
        let gone: Vec<DevicePtr> = with_pages(|known| {
            let gone: Vec<_> = known.mapped.range(address..end).map(|(&start, _)| start).collect();
            known.mapped.retain(|start, _| !(address..end).contains(start));
            gone
        });
        for start in gone {
            freeing(start, StreamHandle::ALL_STREAMS);
        }
    });
}
