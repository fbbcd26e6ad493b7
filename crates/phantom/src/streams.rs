//! Stream handles and the streams behind them.

use std::cell::RefCell;
use std::thread::ThreadId;

use rustc_hash::FxHashMap;

use crate::rendezvous::WorkId;

/// A stream's key; unlike its handle, unique for the life of the simulator.
pub(crate) type StreamKey = u32;

/// A stream's relation to the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamKind {
    /// The legacy default stream itself (handles 0 and 1).
    Legacy,
    /// The stream and the legacy stream wait for each other (`CU_STREAM_DEFAULT`; the per-thread
    /// default stream, handle 2).
    Blocking,
    /// No order with the legacy stream (`CU_STREAM_NON_BLOCKING`).
    NonBlocking,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) device: u32,
    pub(crate) kind: StreamKind,
    /// The end of everything enqueued so far, virtual nanoseconds.
    pub(crate) tail: u64,
    /// The last work, if its end is not known yet.
    pub(crate) open: Option<WorkId>,
    /// The stream's capture.
    pub(crate) capture: Option<u64>,
    pub(crate) destroyed: bool,
    /// The program has promised the allocator that the stream lasts until destroyed, or the stream
    /// is the allocator's own.
    pub(crate) lasting: bool,
}

thread_local! {
    static VOUCHED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Runs `call`, a call of the allocator that names the stream of `handle`: the stream exists until
/// it returns (see [`crate::Config::vouched_streams`]).
pub fn vouching<T>(handle: usize, call: impl FnOnce() -> T) -> T {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            VOUCHED.with_borrow_mut(Vec::pop);
        }
    }
    VOUCHED.with_borrow_mut(|vouched| vouched.push(handle));
    let _restore = Restore;
    call()
}

/// Whether this thread is in a call that names the stream of `handle`.
pub(crate) fn is_vouched(handle: usize) -> bool {
    VOUCHED.with_borrow(|vouched| vouched.contains(&handle))
}

/// The first handle of a user's stream, and the distance between two: handles look like pointers,
/// as the driver's do.
const FIRST_HANDLE: usize = 0x5000_0000;
const HANDLE_STEP: usize = 0x100;

#[derive(Debug, Default)]
pub(crate) struct Streams {
    all: Vec<Stream>,
    by_handle: FxHashMap<usize, StreamKey>,
    legacy: FxHashMap<u32, StreamKey>,
    /// Streams without a handle; events of a whole device are recorded on them while work is open.
    marks: FxHashMap<u32, StreamKey>,
    per_thread: FxHashMap<(ThreadId, u32), StreamKey>,
    /// Handles of destroyed streams; the last one destroyed is the first one reused.
    recycled: Vec<usize>,
    /// Live blocking streams of each device.
    blocking: FxHashMap<u32, Vec<StreamKey>>,
}

impl Streams {
    fn add(&mut self, handle: usize, device: u32, kind: StreamKind) -> StreamKey {
        let key = self.all.len() as StreamKey;
        self.all.push(Stream {
            handle,
            device,
            kind,
            tail: 0,
            open: None,
            capture: None,
            destroyed: false,
            lasting: false,
        });
        if kind == StreamKind::Blocking {
            self.blocking.entry(device).or_default().push(key);
        }
        key
    }

    /// The stream of `handle` on `device`; `None`: destroyed, or never created.
    pub(crate) fn resolve(&mut self, device: u32, handle: usize) -> Option<StreamKey> {
        match handle {
            0 | 1 => {
                if let Some(&key) = self.legacy.get(&device) {
                    return Some(key);
                }
                let key = self.add(0, device, StreamKind::Legacy);
                self.legacy.insert(device, key);
                Some(key)
            }
            2 => {
                let thread = (std::thread::current().id(), device);
                if let Some(&key) = self.per_thread.get(&thread) {
                    return Some(key);
                }
                let key = self.add(2, device, StreamKind::Blocking);
                self.per_thread.insert(thread, key);
                Some(key)
            }
            _ => self.by_handle.get(&handle).copied(),
        }
    }

    /// The stream that stands for all streams of a device.
    pub(crate) fn marks(&mut self, device: u32) -> StreamKey {
        if let Some(&key) = self.marks.get(&device) {
            return key;
        }
        let key = self.add(0, device, StreamKind::NonBlocking);
        self.marks.insert(device, key);
        key
    }

    pub(crate) fn create(&mut self, device: u32, kind: StreamKind) -> usize {
        let handle = self.recycled.pop().unwrap_or(FIRST_HANDLE + self.all.len() * HANDLE_STEP);
        let key = self.add(handle, device, kind);
        self.by_handle.insert(handle, key);
        handle
    }

    /// Ends a user's stream; its handle is recycled next.
    pub(crate) fn destroy(&mut self, key: StreamKey) {
        let stream = &mut self.all[key as usize];
        stream.destroyed = true;
        self.by_handle.remove(&stream.handle);
        self.recycled.push(stream.handle);
        if let Some(blocking) = self.blocking.get_mut(&stream.device) {
            blocking.retain(|&k| k != key);
        }
    }

    /// Whether `handle` belonged to a stream that no longer exists.
    pub(crate) fn is_destroyed(&self, handle: usize) -> bool {
        self.recycled.contains(&handle)
    }

    /// The users' streams of a device.
    pub(crate) fn of_device(&self, device: u32) -> Vec<StreamKey> {
        let mut keys: Vec<_> = self
            .by_handle
            .values()
            .copied()
            .filter(|&key| self.get(key).device == device)
            .collect();
        keys.sort_unstable();
        keys
    }

    pub(crate) fn get(&self, key: StreamKey) -> &Stream {
        &self.all[key as usize]
    }

    pub(crate) fn get_mut(&mut self, key: StreamKey) -> &mut Stream {
        &mut self.all[key as usize]
    }

    /// The streams that precede new work of `key` by the rule of the legacy default stream.
    pub(crate) fn implied(&self, key: StreamKey) -> &[StreamKey] {
        let stream = self.get(key);
        match stream.kind {
            StreamKind::NonBlocking => &[],
            StreamKind::Legacy => self.blocking.get(&stream.device).map_or(&[], |keys| keys),
            StreamKind::Blocking => {
                self.legacy.get(&stream.device).map_or(&[], std::slice::from_ref)
            }
        }
    }

    /// The number of users' streams.
    pub(crate) fn user_streams(&self) -> usize {
        self.by_handle.len()
    }

    /// The number of streams ever created.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }
}
