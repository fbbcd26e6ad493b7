//! The kinds of driver calls, their callers and their counts.

use std::cell::Cell;

macro_rules! call_kinds {
    ($($(#[$doc:meta])* $kind:ident => $name:literal,)*) => {
        /// The kinds of simulated driver calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum CallKind {
            $($(#[$doc])* $kind,)*
        }

        impl CallKind {
            /// Every kind, in the order of their declaration.
            pub const ALL: &'static [CallKind] = &[$(CallKind::$kind,)*];

            /// The driver's own name of the call.
            pub const fn name(self) -> &'static str {
                match self {
                    $(CallKind::$kind => $name,)*
                }
            }
        }
    };
}

call_kinds! {
    /// A question about a device: attributes, peers.
    DeviceQuery => "cuDeviceGetAttribute",
    /// Free and total memory.
    MemoryInfo => "cuMemGetInfo",
    /// A pool is created.
    PoolCreate => "cuMemPoolCreate",
    /// A pool is destroyed.
    PoolDestroy => "cuMemPoolDestroy",
    /// A pool's attribute is read.
    PoolGetAttribute => "cuMemPoolGetAttribute",
    /// A pool's attribute is set.
    PoolSetAttribute => "cuMemPoolSetAttribute",
    /// A pool is trimmed.
    PoolTrim => "cuMemPoolTrimTo",
    /// A peer is let into a pool.
    PoolSetAccess => "cuMemPoolSetAccess",
    /// An allocation from a pool.
    PoolAlloc => "cuMemAllocFromPoolAsync",
    /// A free to a pool.
    PoolFree => "cuMemFreeAsync",
    /// Address space is reserved.
    AddressReserve => "cuMemAddressReserve",
    /// Address space is given back.
    AddressFree => "cuMemAddressFree",
    /// Physical memory is created.
    Create => "cuMemCreate",
    /// A handle is given up.
    Release => "cuMemRelease",
    /// A handle is mapped.
    Map => "cuMemMap",
    /// Access is granted.
    SetAccess => "cuMemSetAccess",
    /// Mappings are taken away.
    Unmap => "cuMemUnmap",
    /// Physical memory of another process is taken up.
    Import => "cuMemImportFromShareableHandle",
    /// A plain allocation.
    Alloc => "cuMemAlloc",
    /// A plain free.
    Free => "cuMemFree",
    /// Memory is filled.
    Memset => "cuMemsetD8Async",
    /// An event is created.
    EventCreate => "cuEventCreate",
    /// An event is destroyed.
    EventDestroy => "cuEventDestroy",
    /// An event is recorded.
    EventRecord => "cuEventRecord",
    /// An event is recorded behind all work of a context.
    ContextEventRecord => "cuCtxRecordEvent",
    /// An event is asked for.
    EventQuery => "cuEventQuery",
    /// The host waits for an event.
    EventSynchronize => "cuEventSynchronize",
    /// A stream waits for an event.
    StreamWaitEvent => "cuStreamWaitEvent",
    /// A stream is created.
    StreamCreate => "cuStreamCreate",
    /// A stream is destroyed.
    StreamDestroy => "cuStreamDestroy",
    /// A stream is asked for.
    StreamQuery => "cuStreamQuery",
    /// The host waits for a stream.
    StreamSynchronize => "cuStreamSynchronize",
    /// A stream's id is read.
    StreamId => "cuStreamGetId",
    /// A stream's capture status is read.
    CaptureStatus => "cuStreamGetCaptureInfo",
    /// The host waits for a device.
    DeviceSynchronize => "cuCtxSynchronize",
    /// A device is reset.
    DeviceReset => "cuDevicePrimaryCtxReset",
    /// Kernels are launched (counted one by one).
    Launch => "cuLaunchKernel",
    /// A stream waits for a value in memory.
    StreamWaitValue => "cuStreamWaitValue32",
    /// A stream writes a value to memory.
    StreamWriteValue => "cuStreamWriteValue32",
    /// A host function is enqueued.
    HostFunction => "cuLaunchHostFunc",
    /// A capture begins.
    BeginCapture => "cuStreamBeginCapture",
    /// A capture ends.
    EndCapture => "cuStreamEndCapture",
    /// A graph is launched.
    GraphLaunch => "cuGraphLaunch",
    /// A graph is destroyed.
    GraphDestroy => "cuGraphExecDestroy",
}

/// The caller of a driver call. The books, the oracle and the bench distinguish the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Caller {
    /// The allocator under test: every call outside [`as_program`].
    #[default]
    Allocator,
    /// The program that uses the allocator: the training script, the trace.
    Program,
}

thread_local! {
    static CALLER: Cell<Caller> = const { Cell::new(Caller::Allocator) };
}

/// Runs `calls` as the program's: this thread's simulated calls inside count as [`Caller::Program`]
/// and may do on a capturing stream what an allocator may not.
pub fn as_program<T>(calls: impl FnOnce() -> T) -> T {
    struct Restore(Caller);
    impl Drop for Restore {
        fn drop(&mut self) {
            CALLER.set(self.0);
        }
    }
    let _restore = Restore(CALLER.replace(Caller::Program));
    calls()
}

/// The caller of this thread's calls at this moment.
pub fn current_caller() -> Caller {
    CALLER.get()
}

/// The number of calls of each kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCounts([u64; CallKind::ALL.len()]);

impl Default for CallCounts {
    fn default() -> Self {
        Self([0; CallKind::ALL.len()])
    }
}

impl CallCounts {
    /// Calls of `kind`.
    pub fn of(&self, kind: CallKind) -> u64 {
        self.0[kind as usize]
    }

    /// Calls of all kinds.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The kinds called at least once, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (CallKind, u64)> + '_ {
        CallKind::ALL.iter().map(|&kind| (kind, self.of(kind))).filter(|&(_, n)| n > 0)
    }

    pub(crate) fn add(&mut self, kind: CallKind, n: u64) -> u64 {
        self.0[kind as usize] += n;
        self.0[kind as usize]
    }
}
