//! Host time of the driver's calls: for each kind of call and class of sizes a histogram, the sum,
//! and the longest.
//!
//! ```text
//! counter    its one writer at a time   meaning
//! counts[n]  + 1                        calls whose time is of bucket n
//! ticks      + ticks                    their sum
//! longest    the larger of both         the longest of them
//! ```
//!
//! All only grow, and each is whole by itself: a reader may see a call in one of them and not yet
//! in another. Ticks are those of [`crate::clock`]. Writers take turns ([`CallWriter`]): one locked
//! instruction for all three counters.

use std::sync::atomic::{AtomicBool, Ordering as PrivateOrdering};

use serde::{Deserialize, Serialize};

use crate::clock::Scale;
use crate::layout::Shared;
use crate::sync::{AtomicU64, Ordering, bump};

macro_rules! driver_calls {
    ($($(#[$doc:meta])* $kind:ident, $name:literal, $sized:literal;)*) => {
        /// The calls of the driver that the heap makes. Those that change memory and those that
        /// wait come first: they are on the record ([`DriverCall::is_recorded`]), and their numbers
        /// are part of its layout.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DriverCall {
            $($(#[$doc])* $kind,)*
        }

        impl DriverCall {
            /// All, by number.
            pub const ALL: &[DriverCall] = &[$(DriverCall::$kind,)*];

            /// The driver's own name.
            pub const fn name(self) -> &'static str {
                match self { $(DriverCall::$kind => $name,)* }
            }

            /// Whether the record says how long it takes.
            pub const fn is_recorded(self) -> bool {
                (self as usize) < RECORDED_CALLS
            }

            /// Whether the bytes that a call is about are known; where they are not, all are of the
            /// first class.
            pub const fn is_sized(self) -> bool {
                match self { $(DriverCall::$kind => $sized,)* }
            }
        }
    };
}

driver_calls! {
    /// Address space is reserved.
    AddressReserve, "cuMemAddressReserve", true;
    /// Address space is given back.
    AddressFree, "cuMemAddressFree", true;
    /// Physical memory is created.
    Create, "cuMemCreate", true;
    /// A handle is given up.
    Release, "cuMemRelease", false;
    /// A handle is mapped.
    Map, "cuMemMap", true;
    /// Access is granted.
    SetAccess, "cuMemSetAccess", true;
    /// Mappings are taken away.
    Unmap, "cuMemUnmap", true;
    /// A pool is created.
    PoolCreate, "cuMemPoolCreate", false;
    /// A pool is destroyed.
    PoolDestroy, "cuMemPoolDestroy", false;
    /// A peer is let into a pool.
    PoolSetAccess, "cuMemPoolSetAccess", false;
    /// A pool is trimmed.
    PoolTrim, "cuMemPoolTrimTo", false;
    /// An allocation from a pool.
    PoolAlloc, "cuMemAllocFromPoolAsync", true;
    /// A free to a pool.
    PoolFree, "cuMemFreeAsync", false;
    /// A plain allocation.
    Alloc, "cuMemAlloc", true;
    /// A plain free, which waits for the device.
    Free, "cuMemFree", false;
    /// The host waits for an event.
    EventSynchronize, "cuEventSynchronize", false;
    /// The host waits for a stream.
    StreamSynchronize, "cuStreamSynchronize", false;
    /// The host waits for a device.
    DeviceSynchronize, "cuCtxSynchronize", false;
    /// A question about a device: attributes, peers.
    DeviceQuery, "cuDeviceGetAttribute", false;
    /// Free and total memory.
    MemoryInfo, "cuMemGetInfo", false;
    /// A pool's attribute is read.
    PoolGetAttribute, "cuMemPoolGetAttribute", false;
    /// A pool's attribute is set.
    PoolSetAttribute, "cuMemPoolSetAttribute", false;
    /// Physical memory is offered to other processes.
    Export, "cuMemExportToShareableHandle", false;
    /// Physical memory of another process is taken up.
    Import, "cuMemImportFromShareableHandle", false;
    /// A plain allocation is offered to other processes.
    IpcHandle, "cuIpcGetMemHandle", false;
    /// A plain allocation of another process is opened.
    IpcOpen, "cuIpcOpenMemHandle", false;
    /// A plain allocation of another process is closed.
    IpcClose, "cuIpcCloseMemHandle", false;
    /// Memory is filled.
    Memset, "cuMemsetD8Async", true;
    /// An event is created.
    EventCreate, "cuEventCreate", false;
    /// An event is destroyed.
    EventDestroy, "cuEventDestroy", false;
    /// An event is recorded.
    EventRecord, "cuEventRecord", false;
    /// An event is recorded behind all work of a context.
    ContextEventRecord, "cuCtxRecordEvent", false;
    /// An event is asked for.
    EventQuery, "cuEventQuery", false;
    /// A stream waits for an event.
    StreamWaitEvent, "cuStreamWaitEvent", false;
    /// A stream is created.
    StreamCreate, "cuStreamCreate", false;
    /// A stream is destroyed.
    StreamDestroy, "cuStreamDestroy", false;
    /// A stream's id is read.
    StreamId, "cuStreamGetId", false;
    /// A stream's capture status is read.
    CaptureStatus, "cuStreamGetCaptureInfo", false;
}

/// Number of recorded kinds of calls.
pub const RECORDED_CALLS: usize = DriverCall::DeviceSynchronize as usize + 1;

/// Upper bounds of the size classes, bytes; the last has none.
pub const SIZE_CLASSES: [u64; 4] = [2 << 20, 32 << 20, 256 << 20, u64::MAX];

/// The class of `bytes`.
#[inline]
pub fn class_of(bytes: u64) -> usize {
    // Most are of the first, and every call passes here.
    match bytes {
        _ if bytes <= SIZE_CLASSES[0] => 0,
        _ if bytes <= SIZE_CLASSES[1] => 1,
        _ if bytes <= SIZE_CLASSES[2] => 2,
        _ => 3,
    }
}

/// Buckets per histogram: 32 ticks each below 256, then four per doubling; the last holds
/// everything from about a minute on.
pub const BUCKETS: usize = 126;
/// Ticks of the finest bucket, as a power of two: some ten nanoseconds, less than reading the clock
/// twice.
const FINEST: u32 = 5;

#[inline]
const fn bucket_of(ticks: u64) -> usize {
    let value = ticks >> FINEST;
    let shift = (value | 4).ilog2() as usize - 2;
    let bucket = shift * 4 + (value >> shift) as usize;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

/// The lowest value of a bucket, ticks.
fn bucket_floor(bucket: usize) -> u64 {
    let value =
        if bucket < 8 { bucket as u64 } else { ((bucket % 4 + 4) as u64) << (bucket / 4 - 1) };
    value << FINEST
}

/// The highest value of a bucket, ticks.
fn bucket_ceiling(bucket: usize) -> u64 {
    if bucket + 1 < BUCKETS { bucket_floor(bucket + 1) - 1 } else { u64::MAX }
}

fn bucket_middle(bucket: usize) -> u64 {
    let (floor, ceiling) = (bucket_floor(bucket), bucket_ceiling(bucket));
    floor + (ceiling - floor) / 2
}

/// The calls of one kind and one class of sizes. 1 KiB.
#[repr(C, align(64))]
struct ClassTimes {
    ticks: AtomicU64,
    longest: AtomicU64,
    counts: [AtomicU64; BUCKETS],
}

/// The calls of one kind, a page: allocated with the first of them.
#[repr(C, align(64))]
pub struct CallTimes([ClassTimes; SIZE_CLASSES.len()]);

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<CallTimes>() == 4096);
    assert!(RECORDED_CALLS <= 64, "a bit each in the header");
};

// SAFETY: repr(C), atomics throughout; every bit pattern is a value.
unsafe impl Shared for CallTimes {}

impl CallTimes {
    /// Notes a call about `bytes` that took `ticks`. The caller is the only writer of these times.
    #[inline]
    pub fn note(&self, bytes: u64, ticks: u64) {
        let class = &self.0[class_of(bytes)];
        bump(&class.counts[bucket_of(ticks)], 1);
        bump(&class.ticks, ticks);
        if ticks > class.longest.load(Ordering::Relaxed) {
            class.longest.store(ticks, Ordering::Relaxed);
        }
    }

    /// The classes with any calls.
    pub(crate) fn read(&self, call: DriverCall) -> impl Iterator<Item = Calls> + '_ {
        self.0.iter().zip(SIZE_CLASSES).filter_map(move |(class, most)| {
            let counts = class.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            let (ticks, longest) =
                (class.ticks.load(Ordering::Relaxed), class.longest.load(Ordering::Relaxed));
            let calls =
                Calls { call, up_to: call.is_sized().then_some(most), ticks, longest, counts };
            (calls.count() > 0).then_some(calls)
        })
    }
}

/// Lets the threads of the process take turns at writing the times of one kind of call. In memory
/// of its own: a process that dies while writing leaves nothing locked.
///
/// ```text
/// state   changed by
/// false   a thread (swap), which then writes: true
/// true    that thread, after writing: false; others try again
/// ```
#[derive(Debug, Default)]
pub struct CallWriter(AtomicBool);

impl CallWriter {
    /// [`CallTimes::note`], in this thread's turn. Turns last some nanoseconds, unless the kernel
    /// preempts the thread.
    #[inline]
    pub fn note(&self, times: &CallTimes, bytes: u64, ticks: u64) {
        while self.0.swap(true, PrivateOrdering::Acquire) {
            std::thread::yield_now();
        }
        times.note(bytes, ticks);
        self.0.store(false, PrivateOrdering::Release);
    }
}

/// The calls of one kind and class, for a reader. Times in ticks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calls {
    /// The kind of these calls.
    pub call: DriverCall,
    /// Upper bound of the class, bytes ([`u64::MAX`]: none); `None`: the kind has no size classes.
    pub up_to: Option<u64>,
    /// The sum of their ticks.
    pub ticks: u64,
    /// The longest.
    pub longest: u64,
    counts: Vec<u64>,
}

impl Calls {
    /// Number of calls.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
    }

    /// The time that a share of `quantile` of them took at most, within an eighth; never above the
    /// longest.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let rank = (quantile * self.count() as f64).ceil().max(1.0);
        let mut seen = 0.0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            seen += count as f64;
            if seen >= rank {
                return bucket_middle(bucket).min(self.longest);
            }
        }
        self.longest
    }

    /// In time, for users and run files.
    pub fn in_time(&self, scale: Scale) -> CallTime {
        let nanoseconds = |ticks: u64| (ticks as f64 * scale.nanoseconds_per_tick) as u64;
        CallTime {
            call: self.call.name().to_owned(),
            up_to_bytes: self.up_to.filter(|&most| most < u64::MAX),
            is_sized: self.up_to.is_some(),
            count: self.count(),
            total_nanoseconds: nanoseconds(self.ticks),
            p50_nanoseconds: nanoseconds(self.quantile(0.5)),
            p99_nanoseconds: nanoseconds(self.quantile(0.99)),
            max_nanoseconds: nanoseconds(self.longest),
        }
    }

    /// The nonempty buckets: the middle of each in ticks, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.counts.iter().copied().enumerate();
        counts.filter(|&(_, count)| count > 0).map(|(bucket, count)| (bucket_middle(bucket), count))
    }
}

/// Host time of the calls of one kind and class of sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallTime {
    /// The driver's own name.
    pub call: String,
    /// Upper bound of the class, bytes; `None`: none.
    pub up_to_bytes: Option<u64>,
    /// Whether the kind has size classes.
    pub is_sized: bool,
    /// Number of calls.
    pub count: u64,
    /// Their sum.
    pub total_nanoseconds: u64,
    /// The median, within an eighth.
    pub p50_nanoseconds: u64,
    /// The 99th percentile, within an eighth.
    pub p99_nanoseconds: u64,
    /// The longest.
    pub max_nanoseconds: u64,
}

impl CallTime {
    /// Whether the call waits for the device: its time is then the device's, not the call's price.
    pub fn is_wait(&self) -> bool {
        self.call.ends_with("Synchronize")
    }

    /// Sums by kind of call over all sizes: kind, number, nanoseconds. The costliest first.
    pub fn by_kind(times: &[CallTime]) -> Vec<(&str, u64, u64)> {
        let mut kinds: Vec<(&str, u64, u64)> = Vec::new();
        for time in times {
            let place = kinds.iter().position(|kind| kind.0 == time.call).unwrap_or_else(|| {
                kinds.push((&time.call, 0, 0));
                kinds.len() - 1
            });
            kinds[place].1 = kinds[place].1.saturating_add(time.count);
            kinds[place].2 = kinds[place].2.saturating_add(time.total_nanoseconds);
        }
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.2));
        kinds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_between_its_buckets_floor_and_ceiling_and_buckets_are_within_a_quarter() {
        for power in 0..64 {
            for ticks in [1u64 << power, (1u64 << power) - 1, (1u64 << power) + (1u64 << power) / 3]
            {
                let bucket = bucket_of(ticks);
                assert!(bucket < BUCKETS, "{ticks}: {bucket}");
                let (floor, ceiling) = (bucket_floor(bucket), bucket_ceiling(bucket));
                assert!(floor <= ticks && ticks <= ceiling, "{ticks} in {floor}..={ceiling}");
                assert!(
                    ceiling - floor <= 31.max(floor / 4) || bucket == BUCKETS - 1,
                    "{floor}..={ceiling} is too wide"
                );
            }
        }
        assert!((1..BUCKETS).all(|bucket| bucket_floor(bucket) == bucket_ceiling(bucket - 1) + 1));
    }

    #[test]
    fn sizes_fall_into_their_classes() {
        let classes =
            [0, 2 << 20, (2 << 20) + 1, 32 << 20, 33 << 20, 256 << 20, 257 << 20, u64::MAX]
                .map(class_of);
        assert_eq!(classes, [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn what_was_noted_is_read_with_its_sum_and_quantiles() {
        // SAFETY: all-zero is a valid value.
        let times: Box<CallTimes> = unsafe { Box::new_zeroed().assume_init() };
        for ticks in 1..=1000 {
            times.note(2 << 20, ticks * 1000);
        }
        times.note(1 << 30, 7);
        let read: Vec<Calls> = times.read(DriverCall::Create).collect();
        assert_eq!(
            read.iter().map(|calls| calls.up_to).collect::<Vec<_>>(),
            [Some(2 << 20), Some(u64::MAX)]
        );
        let small = &read[0];
        assert_eq!((small.count(), small.ticks, small.longest), (1000, 500_500_000, 1_000_000));
        for (quantile, exact) in [(0.5, 500_000.0), (0.99, 990_000.0)] {
            let told = small.quantile(quantile) as f64;
            assert!((told / exact - 1.0).abs() <= 0.125, "{quantile}: {told}");
        }
        assert_eq!(read[1].quantile(1.0), 7, "never more than the longest");
        assert_eq!(small.buckets().map(|(_, count)| count).sum::<u64>(), 1000);
        assert_eq!(times.read(DriverCall::Release).next().map(|calls| calls.up_to), Some(None));
    }
}
