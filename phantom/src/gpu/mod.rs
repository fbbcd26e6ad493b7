//! The simulator: one state under one lock, the driver's calls as methods, a file a group of calls.

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

/// Questions in a row after which a program is taken to wait: more than an allocator asks about its
/// blocks, soon over for a thread that does nothing else.
const PATIENCE: u32 = 10_000;

/// A call whose caller broke the driver's rules; the simulator refused it, unless the rule is about
/// whose stream it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misuse {
    /// The call.
    pub call: &'static str,
    /// What was wrong with it.
    pub what: &'static str,
    /// The address or the handle that it was about.
    pub about: u64,
}

impl std::fmt::Display for Misuse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({:#x}): {}", self.call, self.about, self.what)
    }
}

/// An event: what it was last recorded behind.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    pub(crate) recorded: Recorded,
    /// What its stream knew then.
    pub(crate) clock: Clock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Never: complete, and no order.
    Not,
    /// Complete at this time.
    At(u64),
    /// Complete when this open work is.
    Behind(WorkId),
    /// In this capture.
    Captured(u64),
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) books: DeviceBooks,
    /// When everything enqueued on any of its streams is done.
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
    /// Questions in a row, with no other call between, to which the answer was "not yet".
    pub(crate) asked_in_vain: u32,
    injections: Injections,
    pub(crate) misuses: Vec<Misuse>,
    pub(crate) oracle: Option<Oracle>,
    /// The sticky error, once there is one.
    lost: Option<u32>,
    /// The number of the next physical byte to be created.
    next_physical: u64,
}

/// A stand-in GPU (or several).
///
/// Methods named after the driver's calls take the device where the driver would take it from the
/// current context. Streams, events and pools are raw handles, as the driver has them: stream 0 and
/// 1 are the legacy default stream of the given device, 2 the calling thread's. Everything outside
/// of [`crate::as_program`] is the allocator's call.
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
    /// With more than 64 devices: access is kept as a bit each.
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

    /// A panic under the lock is a test's failing assertion: the books are still worth reading.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a fault.
    pub fn inject(&self, injection: Injection) {
        self.lock().injections.arm(injection);
    }

    /// Disarms every fault that has not struck yet. A lost device stays lost.
    pub fn clear_injections(&self) {
        self.lock().injections.clear();
    }
}

impl State {
    /// The beginning of every call: counts it, and fails it where the device is lost, does not
    /// exist, or a fault is armed.
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

    /// Whether what will be done at `time` is done. Nobody's clock runs while a program asks that
    /// over and over and does nothing else (torch's watchdog of NCCL, as a process group ends): it
    /// waits, and after so many questions in a row the clock goes where its wait ends.
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

    /// [`State::enter`] for a call of a fixed price.
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

    /// The stream that a handle names; code 400 where it names none.
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

    /// Notes a call of the allocator on a created stream that may be gone.
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

    /// Numbers for `bytes` physical bytes.
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
