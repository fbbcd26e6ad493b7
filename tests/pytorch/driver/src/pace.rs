//! Passes over a trace through one allocator or another, timed: the real torch's and Gruyère's C
//! functions by the same loop.

use crate::caching::CachingAllocator;
use gruyere_replay::trace::{Op, Trace};
use std::ffi::{c_int, c_void};

type Malloc = unsafe extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);
type RecordStream = unsafe extern "C" fn(*mut c_void, *mut c_void);
type MarkStep = unsafe extern "C" fn();

/// Gruyère's functions, found by the caller in the library that it has loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Functions {
    malloc: Malloc,
    free: Free,
    record_stream: RecordStream,
    mark_step: MarkStep,
}

/// What a pass measured.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Mallocs and frees, those of 0 bytes left out.
    pub operations: u64,
    /// Processor time of this thread, nanoseconds: what else runs on the machine does not count.
    pub nanoseconds: u64,
}

/// An allocator as a pass drives it.
trait Driven {
    /// Address 0: out of memory.
    fn malloc(&mut self, size: u64, stream: usize) -> usize;
    fn free(&mut self, address: usize, size: u64, stream: usize);
    fn record_stream(&mut self, address: usize, stream: usize);
    fn step(&mut self);
}

impl Driven for CachingAllocator {
    #[inline(always)]
    fn malloc(&mut self, size: u64, stream: usize) -> usize {
        Self::malloc(self, size as usize, stream)
    }

    #[inline(always)]
    fn free(&mut self, address: usize, _: u64, _: usize) {
        Self::free(self, address);
    }

    #[inline(always)]
    fn record_stream(&mut self, address: usize, stream: usize) {
        Self::record_stream(self, address, stream);
    }

    fn step(&mut self) {}
}

impl Driven for Functions {
    #[inline(always)]
    fn malloc(&mut self, size: u64, stream: usize) -> usize {
        // SAFETY: the caller of the pass gave functions of these types.
        unsafe { (self.malloc)(size as isize, 0, stream as *mut c_void) as usize }
    }

    #[inline(always)]
    fn free(&mut self, address: usize, size: u64, stream: usize) {
        // SAFETY: as for `malloc`; the address is live and came with this size and stream.
        unsafe { (self.free)(address as *mut c_void, size as isize, 0, stream as *mut c_void) }
    }

    #[inline(always)]
    fn record_stream(&mut self, address: usize, stream: usize) {
        // SAFETY: as for `malloc`; the address is live.
        unsafe { (self.record_stream)(address as *mut c_void, stream as *mut c_void) }
    }

    #[inline(always)]
    fn step(&mut self) {
        // SAFETY: as for `malloc`.
        unsafe { (self.mark_step)() }
    }
}

/// Hands out numbers: what the loop itself takes.
struct Nobody(usize);

impl Driven for Nobody {
    #[inline(always)]
    fn malloc(&mut self, _: u64, _: usize) -> usize {
        self.0 += 512;
        std::hint::black_box(self.0)
    }

    #[inline(always)]
    fn free(&mut self, address: usize, _: u64, _: usize) {
        std::hint::black_box(address);
    }

    fn record_stream(&mut self, _: usize, _: usize) {}

    fn step(&mut self) {}
}

/// Which allocator a pass drives.
pub enum Who {
    /// The one that torch uses now.
    Torch,
    /// Gruyère.
    Gruyere(Functions),
    /// None: the loop.
    Nobody,
}

/// One pass over the mallocs, frees, record_streams and steps of `trace`, in order, without a
/// pause; then a free of what it leaves live, so that the next pass finds what this one found.
///
/// # Errors
/// Where the allocator cannot be found, or ran out of memory.
pub fn pass(trace: &Trace, streams: &[usize], who: Who) -> Result<Pass, String> {
    let pass = match who {
        Who::Torch => drive(trace, streams, CachingAllocator::find()?),
        Who::Gruyere(functions) => drive(trace, streams, functions),
        Who::Nobody => drive(trace, streams, Nobody(0)),
    };
    pass.ok_or_else(|| "out of memory".to_owned())
}

/// A block's address, size and stream; address 0: not live.
type Place = (usize, u64, usize);

fn drive(trace: &Trace, streams: &[usize], mut allocator: impl Driven) -> Option<Pass> {
    let mut blocks: Vec<Place> = vec![(0, 0, 0); trace.blocks()];
    let mut operations = 0;
    let start = thread_time();
    for &op in &trace.ops {
        match op {
            Op::Alloc { size, block, stream, .. } if size > 0 => {
                let stream = streams[stream as usize];
                let address = allocator.malloc(size, stream);
                if address == 0 {
                    return None;
                }
                blocks[block as usize] = (address, size, stream);
                operations += 1;
            }
            Op::Free { block } => {
                let (address, size, stream) = std::mem::take(&mut blocks[block as usize]);
                if address != 0 {
                    allocator.free(address, size, stream);
                    operations += 1;
                }
            }
            Op::RecordStream { block, stream } => {
                let (address, ..) = blocks[block as usize];
                if address != 0 {
                    allocator.record_stream(address, streams[stream as usize]);
                }
            }
            Op::Step => allocator.step(),
            _ => {}
        }
    }
    let nanoseconds = thread_time() - start;
    for (address, size, stream) in blocks.into_iter().filter(|block| block.0 != 0) {
        allocator.free(address, size, stream);
    }
    Some(Pass { operations, nanoseconds })
}

fn thread_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the result goes to a local; Linux has had this clock since 2.6.12.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
