//! The simulator: one state under one lock, the driver's calls as methods, one file per group of
//! calls.

mod graph_memory;
mod graphs;
mod memory;
mod order;
mod pools;
mod queries;
mod rendezvous;
mod reset;
mod touch;
mod values;
mod watch;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;

use crate::addresses::{AddressProvider, CountingAddresses};
use crate::backing::Backings;
use crate::books::{AddressBooks, DeviceBooks};
use crate::calls::{CallCounts, CallKind, Caller, current_caller};
use crate::capture::{Capture, Graph};
use crate::config::{Config, DestroyedStreams};
use crate::error::{SimError, SimResult, code};
use crate::inject::{Injection, Injections};
use crate::oracle::{Clock, Oracle};
use crate::pool::Pool;
use crate::rendezvous::{Rendezvous, WorkId};
use crate::streams::{StreamKey, Streams, is_vouched};
use crate::timeline::Timeline;
use crate::vmm::{Refused, Vmm};

pub use pools::PoolBooks;
pub use queries::{Held, HostTime};
pub use rendezvous::Half;
pub use values::HostFunction;

/// Unsuccessful queries in a row after which the simulator takes the program to be waiting: more
/// than an allocator makes about its blocks, soon reached by a thread that does nothing else.
const PATIENCE: u32 = 10_000;

/// A call that broke the driver's rules. The simulator refused it, unless the rule concerns the
/// owner of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misuse {
    /// The call.
    pub call: &'static str,
    /// The broken rule.
    pub what: &'static str,
    /// The address or handle in question.
    pub about: u64,
}

impl std::fmt::Display for Misuse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({:#x}): {}", self.call, self.about, self.what)
    }
}

/// An event and the work that it was last recorded behind.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    pub(crate) recorded: Recorded,
    /// The stream's clock at the record.
    pub(crate) clock: Clock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Never recorded: complete, and no order.
    Not,
    /// Complete at this time, virtual nanoseconds.
    At(u64),
    /// Complete with this open work.
    Behind(WorkId),
    /// Recorded in this capture.
    Captured(u64),
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) books: DeviceBooks,
    /// The end of all work enqueued on the device's streams.
    pub(crate) tail: u64,
}

pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) time: Timeline,
    pub(crate) devices: Vec<Device>,
    pub(crate) streams: Streams,
    pub(crate) rendezvous: Rendezvous,
    pub(crate) events: FxHashMap<usize, Event>,
    pub(crate) next_event: usize,
    pub(crate) pools: BTreeMap<usize, Pool>,
    pub(crate) next_pool: usize,
    pub(crate) vmm: Vmm,
    pub(crate) backings: Backings,
    pub(crate) addresses: Box<dyn AddressProvider>,
    pub(crate) space: AddressBooks,
    pub(crate) captures: Vec<Capture>,
    pub(crate) graphs: FxHashMap<u64, Graph>,
    pub(crate) next_capture: u64,
    pub(crate) next_group: u64,
    pub(crate) counts: [CallCounts; 2],
    /// Queries in a row, with no other call between, that returned "not yet".
    pub(crate) asked_in_vain: u32,
    injections: Injections,
    pub(crate) misuses: Vec<Misuse>,
    pub(crate) oracle: Option<Oracle>,
    /// The sticky error, if any.
    lost: Option<u32>,
    /// The number of the next physical byte.
    next_physical: u64,
}

/// A simulated GPU (or several).
///
/// Methods named after the driver's calls take the device as an argument; the driver takes it from
/// the current context. Streams, events and pools are raw handles, as in the driver: streams 0 and
/// 1 are the legacy default stream of the given device, 2 the calling thread's. Every call outside
/// [`crate::as_program`] is the allocator's.
pub struct Gpu {
    state: Mutex<State>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").finish_non_exhaustive()
    }
}

impl Gpu {
    /// A GPU whose addresses are plain numbers.
    pub fn new(config: Config) -> Self {
        Self::with_addresses(config, Box::new(CountingAddresses::default()))
    }

    /// A GPU whose addresses come from `addresses`.
    ///
    /// # Panics
    /// With more than 64 devices: access is a mask of 64 bits.
    pub fn with_addresses(config: Config, addresses: Box<dyn AddressProvider>) -> Self {
        assert!(config.devices.len() <= 64, "at most 64 devices");
        let devices = config.devices.iter().map(|device| Device {
            books: DeviceBooks { capacity: device.capacity, ..DeviceBooks::default() },
            tail: 0,
        });
        let granularity = config.devices.iter().map(|device| device.granularity).min();
        let granularity = granularity.unwrap_or(crate::GRANULARITY);
        let state = State {
            time: Timeline::default(),
            devices: devices.collect(),
            streams: Streams::default(),
            rendezvous: Rendezvous::default(),
            events: FxHashMap::default(),
            next_event: 0,
            pools: BTreeMap::new(),
            next_pool: 0,
            vmm: Vmm::new(granularity),
            backings: Backings::default(),
            addresses,
            space: AddressBooks { limit: 1 << config.address_bits, ..AddressBooks::default() },
            captures: Vec::new(),
            graphs: FxHashMap::default(),
            next_capture: 0,
            next_group: 0,
            counts: Default::default(),
            asked_in_vain: 0,
            injections: Injections::default(),
            misuses: Vec::new(),
            oracle: config.oracle.then(Oracle::default),
            lost: None,
            next_physical: 0,
            config,
        };
        Self { state: Mutex::new(state) }
    }

    /// Ignores poison: a panic under the lock is a test's failed assertion, and the books stay
    /// useful.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a fault.
    pub fn inject(&self, injection: Injection) {
        self.lock().injections.arm(injection);
    }

    /// Disarms every fault that is still pending. A lost device stays lost.
    pub fn clear_injections(&self) {
        self.lock().injections.clear();
    }
}

impl State {
    /// Begins every call: counts it, and fails it if the device is lost or does not exist, or a
    /// fault is armed.
    pub(crate) fn enter(&mut self, kind: CallKind, device: u32) -> SimResult<()> {
        if !matches!(kind, CallKind::EventQuery | CallKind::StreamQuery) {
            self.asked_in_vain = 0;
        }
        self.counts[current_caller() as usize].add(kind, 1);
        if let Some(code) = self.lost {
            return Err(SimError { call: kind.name(), code });
        }
        if device as usize >= self.devices.len() {
            return Err(SimError { call: kind.name(), code: code::INVALID_DEVICE });
        }
        if let Some(code) = self.injections.strike(kind) {
            if code::is_sticky(code) {
                self.lost = Some(code);
            }
            return Err(SimError { call: kind.name(), code });
        }
        Ok(())
    }

    /// Whether work that ends at `time` is done. The virtual clock stands still while a program
    /// only repeats this query (torch's NCCL watchdog at the end of a process group). Such a
    /// program waits, so after [`PATIENCE`] queries in a row the clock advances to the end of its
    /// wait.
    pub(crate) fn is_done(&mut self, time: u64) -> bool {
        if time <= self.time.now() {
            return true;
        }
        self.asked_in_vain += 1;
        if self.asked_in_vain < PATIENCE {
            return false;
        }
        self.asked_in_vain = 0;
        self.time.wait_until(time, current_caller());
        true
    }

    /// [`State::enter`] for a call with a fixed price.
    pub(crate) fn enter_for(&mut self, kind: CallKind, device: u32, cost: u64) -> SimResult<()> {
        self.enter(kind, device)?;
        self.time.spend(cost);
        Ok(())
    }

    /// Notes and refuses a misuse.
    pub(crate) fn refuse<T>(&mut self, kind: CallKind, what: Refused, about: u64) -> SimResult<T> {
        self.misuses.push(Misuse { call: kind.name(), what, about });
        Err(SimError { call: kind.name(), code: code::INVALID_VALUE })
    }

    /// The stream of a handle; code 400 if there is none.
    pub(crate) fn stream(
        &mut self,
        kind: CallKind,
        device: u32,
        handle: usize,
    ) -> SimResult<StreamKey> {
        let found = self.streams.resolve(device, handle);
        if handle > 2 && current_caller() == Caller::Allocator {
            self.judge_use_of(kind, handle, found);
        }
        let key = found.ok_or(SimError { call: kind.name(), code: code::INVALID_HANDLE })?;
        if let Some(oracle) = &mut self.oracle {
            oracle.meet(&self.streams);
        }
        Ok(key)
    }

    /// Notes a call of the allocator on a created stream that may no longer exist.
    fn judge_use_of(&mut self, kind: CallKind, handle: usize, found: Option<StreamKey>) {
        let what = match found {
            None if self.config.destroyed_streams == DestroyedStreams::Misuse
                && self.streams.is_destroyed(handle) =>
            {
                "a call on a destroyed stream"
            }
            Some(key)
                if self.config.vouched_streams
                    && !self.streams.get(key).lasting
                    && !is_vouched(handle) =>
            {
                "a call on a stream for which nobody vouches"
            }
            _ => return,
        };
        self.misuses.push(Misuse { call: kind.name(), what, about: handle as u64 });
    }

    /// Assigns numbers to `bytes` physical bytes; returns the first.
    pub(crate) fn number(&mut self, bytes: u64) -> u64 {
        let first = self.next_physical;
        self.next_physical += bytes;
        first
    }
}

/// An error of `kind` with `code`.
pub(crate) fn fail<T>(kind: CallKind, code: u32) -> SimResult<T> {
    Err(SimError { call: kind.name(), code })
}
