//! Stream captures and the resulting graphs.

use std::cell::Cell;
use std::thread::ThreadId;

use crate::streams::StreamKey;

/// The calls that a capture forbids (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls of every thread.
    #[default]
    Global,
    /// Unsafe calls of the capturing thread.
    ThreadLocal,
    /// Nothing.
    Relaxed,
}

/// A stream's capture status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Work runs as it is enqueued.
    None,
    /// The stream captures its work; the id is unique.
    Active(u64),
    /// The capture has failed and still has to be ended.
    Invalidated,
}

thread_local! {
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

/// `cuThreadExchangeStreamCaptureMode`: sets this thread's mode and returns the old one.
pub fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode {
    MODE.replace(mode)
}

/// Runs `calls` under [`CaptureMode::Relaxed`].
pub fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    struct Restore(CaptureMode);
    impl Drop for Restore {
        fn drop(&mut self) {
            MODE.set(self.0);
        }
    }
    let _restore = Restore(MODE.replace(CaptureMode::Relaxed));
    calls()
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) id: u64,
    pub(crate) origin: StreamKey,
    pub(crate) streams: Vec<StreamKey>,
    pub(crate) mode: CaptureMode,
    pub(crate) thread: ThreadId,
    pub(crate) invalidated: bool,
    /// Captured kernels, and their time one after the other, nanoseconds.
    pub(crate) kernels: u64,
    pub(crate) work: u64,
    /// Captures of one group may share memory (one torch pool id).
    pub(crate) group: u64,
}

/// A captured graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Graph {
    pub(crate) kernels: u64,
    pub(crate) work: u64,
    pub(crate) group: u64,
}

impl Capture {
    /// Whether the capture forbids an unsafe call of this thread.
    pub(crate) fn forbids(&self) -> bool {
        if self.invalidated {
            return false;
        }
        let mine = self.thread == std::thread::current().id();
        match MODE.get() {
            CaptureMode::Relaxed => false,
            CaptureMode::ThreadLocal => mine && self.mode != CaptureMode::Relaxed,
            CaptureMode::Global => match self.mode {
                CaptureMode::Global => true,
                CaptureMode::ThreadLocal => mine,
                CaptureMode::Relaxed => false,
            },
        }
    }
}
