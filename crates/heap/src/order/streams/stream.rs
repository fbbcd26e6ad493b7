//! One stream: its states, its epochs, and its captures as last seen.

use crate::driver::{CaptureStatus, ErrorKind, StreamHandle};
use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// States of a stream, as in the table of [`super`].
pub(super) const PASSING: u8 = 0;
pub(super) const LASTING: u8 = 1;
pub(super) const WITHDRAWN: u8 = 2;
pub(super) const DEAD: u8 = 3;

/// The identity of a stream seen in captures only.
pub(super) const UNTOLD: u64 = u64::MAX;

/// The driver's answer about a stream and captures.
pub(crate) type Status = crate::driver::Result<CaptureStatus>;

/// Whether the answer says that the stream captures nothing, or that no stream ever does.
pub(super) fn is_quiet(status: Status) -> bool {
    match status {
        Ok(status) => status == CaptureStatus::None,
        Err(error) => error.kind == ErrorKind::NotSupported || is_gone(error),
    }
}

/// Whether the driver says that there is no such stream. No other error says so: it may be a
/// capture's.
pub(super) fn is_gone(error: crate::driver::DriverError) -> bool {
    error.is_invalid_handle()
}

/// The handle that means the calling thread's own stream.
pub(super) const PER_THREAD: StreamHandle = StreamHandle(2);

/// What a stream did about capture, as in the table of [`super`].
pub(super) const QUIET: u8 = 0;
pub(super) const IN_SCOPE: u8 = 1;
pub(super) const UNANNOUNCED: u8 = 2;

pub(crate) struct Stream {
    pub(super) handle: AtomicUsize,
    /// The driver's id, 0 if it has none, [`UNTOLD`] if never asked; for the per-thread handle, the
    /// thread's token.
    pub(super) identity: AtomicU64,
    /// The system's id of the thread of a per-thread handle; 0: not known.
    pub(super) thread: AtomicU32,
    pub(super) epoch: AtomicU64,
    pub(super) completed: AtomicU64,
    pub(super) ripe: AtomicU64,
    pub(super) reusable: AtomicU64,
    pub(super) state: AtomicU8,
    pub(super) calls: AtomicU32,
    pub(super) seen: AtomicU8,
}

impl Stream {
    pub(super) fn new(handle: StreamHandle, identity: u64, state: u8) -> Self {
        Self {
            handle: AtomicUsize::new(handle.0),
            identity: AtomicU64::new(identity),
            thread: AtomicU32::new(if handle == PER_THREAD { system_thread_id() } else { 0 }),
            epoch: AtomicU64::new(1),
            completed: AtomicU64::new(0),
            ripe: AtomicU64::new(0),
            reusable: AtomicU64::new(0),
            state: AtomicU8::new(state),
            calls: AtomicU32::new(0),
            seen: AtomicU8::new(QUIET),
        }
    }

    #[inline]
    pub(super) fn handle(&self) -> StreamHandle {
        StreamHandle(self.handle.load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn identity(&self) -> u64 {
        self.identity.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.state.load(Ordering::SeqCst) >= WITHDRAWN
    }

    #[inline]
    pub(super) fn is_lasting(&self) -> bool {
        self.state.load(Ordering::Acquire) == LASTING
    }

    /// Whether its identity is this one; a stream never asked takes it. (All that is known of such
    /// a stream was done in captures, by graphs that run elsewhere.)
    pub(super) fn is_called(&self, identity: u64) -> bool {
        let known = self.identity();
        if known == UNTOLD {
            self.identity.store(identity, Ordering::Release);
        }
        known == identity || known == UNTOLD
    }
}

impl Stream {
    /// Counts a call that names the stream; returns the stream, for the end of the call.
    pub(super) fn enter(&self) -> Option<&Self> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Some(self)
    }

    pub(super) fn leave(&self) {
        self.calls.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes a passing stream's number away, unless a call names it now. Call it under the lock of
    /// `Numbers`.
    pub(super) fn withdraw(&self) -> bool {
        if self
            .state
            .compare_exchange(PASSING, WITHDRAWN, Ordering::SeqCst, Ordering::SeqCst)
            .is_err()
        {
            return false;
        }
        // A call not seen here sees the state.
        let named = self.calls.load(Ordering::SeqCst) > 0;
        if named {
            // The stream may have been destroyed meanwhile.
            let _ =
                self.state.compare_exchange(WITHDRAWN, PASSING, Ordering::SeqCst, Ordering::SeqCst);
        }
        !named
    }

    /// Gives the number to another stream.
    pub(super) fn becomes(&self, handle: StreamHandle, identity: u64, lasting: bool) {
        self.handle.store(handle.0, Ordering::Release);
        self.identity.store(identity, Ordering::Release);
        self.thread
            .store(if handle == PER_THREAD { system_thread_id() } else { 0 }, Ordering::Release);
        self.seen.store(QUIET, Ordering::Release);
        self.state.store(if lasting { LASTING } else { PASSING }, Ordering::SeqCst);
    }
}

thread_local! {
    static TOKEN: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn thread_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    TOKEN.with(|token| {
        if token.get() == 0 {
            token.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        token.get()
    })
}

/// The system's id of the calling thread, the name of its folder in /proc; 0 without /proc.
fn system_thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").ok();
    let name = link.as_deref().and_then(|path| path.file_name()?.to_str()?.parse().ok());
    name.unwrap_or(0)
}

/// Whether the thread of that id has ended; false if that is not known.
pub(super) fn thread_has_ended(thread: u32) -> bool {
    thread != 0 && matches!(std::fs::exists(format!("/proc/self/task/{thread}")), Ok(false))
}
