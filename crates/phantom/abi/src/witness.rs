//! A witness between torch and an allocator: it forwards every malloc and free, keeps its own
//! books, and checks the results. It counts the memory that torch considers live.
//!
//! `phantom_witness_set(malloc, free)` names the allocator by address; torch then gets
//! `phantom_witness_malloc` and `phantom_witness_free`. The allocator's exceptions pass through.

use crate::gpu::try_gpu;
use crate::process::{self, Phase};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Malloc = extern "C-unwind" fn(isize, i32, usize) -> *mut c_void;
type Free = extern "C" fn(*mut c_void, isize, i32, usize);

/// Addresses of the allocator's functions. 0: not set. Set once, before the first malloc.
static MALLOC: AtomicUsize = AtomicUsize::new(0);
static FREE: AtomicUsize = AtomicUsize::new(0);

/// torch's rounding of sizes.
const ALIGNMENT: u64 = 512;

#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    requested: isize,
    device: i32,
    stream: usize,
}

#[derive(Default)]
struct Books {
    blocks: BTreeMap<u64, Block>,
    /// Live bytes and their peak, by device.
    live: BTreeMap<i32, (u64, u64)>,
    mallocs: u64,
    frees: u64,
    violations: u64,
}

static BOOKS: Mutex<Books> = Mutex::new(Books {
    blocks: BTreeMap::new(),
    live: BTreeMap::new(),
    mallocs: 0,
    frees: 0,
    violations: 0,
});

fn books() -> MutexGuard<'static, Books> {
    BOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Books {
    fn object(&mut self, what: std::fmt::Arguments<'_>) {
        self.violations += 1;
        eprintln!("phantom witness: {what}");
    }

    fn note_malloc(&mut self, address: u64, block: Block) {
        self.mallocs += 1;
        let end = address + block.bytes;
        if !address.is_multiple_of(ALIGNMENT) {
            self.object(format_args!("{address:#x} is not aligned to {ALIGNMENT} bytes"));
        }
        if let Some((&other, &Block { bytes, .. })) = self.blocks.range(..end).next_back()
            && other + bytes > address
        {
            self.object(format_args!(
                "{address:#x}+{} overlaps the live block {other:#x}+{bytes}",
                block.bytes
            ));
        }
        let backed =
            try_gpu().is_some_and(|gpu| gpu.sim.is_backed(address, block.requested as u64));
        if !backed {
            self.object(format_args!(
                "{address:#x}+{} is not all backed by device memory",
                block.requested
            ));
        }
        self.blocks.insert(address, block);
        let (live, peak) = self.live.entry(block.device).or_default();
        *live += block.bytes;
        *peak = (*peak).max(*live);
    }

    fn note_free(&mut self, address: u64, requested: isize, device: i32, stream: usize) {
        self.frees += 1;
        let Some(block) = self.blocks.remove(&address) else {
            return self.object(format_args!("free of {address:#x}, which is not live"));
        };
        if (block.requested, block.device, block.stream) != (requested, device, stream) {
            self.object(format_args!(
                "free of {address:#x} with another size, device or stream than its malloc"
            ));
        }
        self.live.entry(block.device).or_default().0 -= block.bytes;
    }
}

fn counting() -> bool {
    process::phase() != Phase::ForkedChild
}

/// Names the allocator's functions by address.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_set(malloc: usize, free: usize) {
    MALLOC.store(malloc, Release);
    FREE.store(free, Release);
}

#[unsafe(no_mangle)]
pub extern "C-unwind" fn phantom_witness_malloc(
    size: isize,
    device: i32,
    stream: usize,
) -> *mut c_void {
    let function = MALLOC.load(Acquire);
    if function == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: phantom_witness_set's caller named a function of this type.
    let malloc = unsafe { std::mem::transmute::<usize, Malloc>(function) };
    // No lock is held while the allocator runs: it may throw.
    let pointer = malloc(size, device, stream);
    if !pointer.is_null() && counting() {
        let bytes = (size.max(0) as u64).next_multiple_of(ALIGNMENT);
        books().note_malloc(pointer as u64, Block { bytes, requested: size, device, stream });
    }
    pointer
}

#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_free(
    pointer: *mut c_void,
    size: isize,
    device: i32,
    stream: usize,
) {
    // Noted before the allocator's free: another thread may get the address at once.
    if !pointer.is_null() && counting() {
        books().note_free(pointer as u64, size, device, stream);
    }
    let function = FREE.load(Acquire);
    if function != 0 {
        // SAFETY: phantom_witness_set's caller named a function of this type.
        let free = unsafe { std::mem::transmute::<usize, Free>(function) };
        free(pointer, size, device, stream);
    }
}

/// Live bytes on `device`, each block rounded up to 512.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_live(device: i32) -> u64 {
    books().live.get(&device).map_or(0, |&(live, _)| live)
}

/// Their peak.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_peak(device: i32) -> u64 {
    books().live.get(&device).map_or(0, |&(_, peak)| peak)
}

/// Blocks handed out so far.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_mallocs() -> u64 {
    books().mallocs
}

/// Blocks freed so far.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_frees() -> u64 {
    books().frees
}

/// Violations: overlapping, unaligned or unbacked blocks, frees of addresses that are not live.
/// Each is named on stderr.
#[unsafe(no_mangle)]
pub extern "C" fn phantom_witness_violations() -> u64 {
    books().violations
}
