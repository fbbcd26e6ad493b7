//! Who decides where a block goes.
//!
//! [`Heap`] is the whole of it: one for the process, with a [`device::Device`] for each GPU in use. Requests up to 1 MiB are
//! served from slabs ([`slab`], [`lane`]) under the lock of their stream's lane; larger ones from runs ([`arena`]) under the device's central
//! lock. [`streams`] knows what stream order allows, [`backing`] takes memory from the driver, [`reclaim`] finds some when there is
//! none, [`capture`] and [`captured`] keep the memory of CUDA graphs apart.
//!
//! Locks, and the order in which they nest: a device's `recycling`; a lane's lock or the central lock, never both;
//! under either, the locks inside `streams` and the record's. No lock is held while the caller is answered.
#![deny(unsafe_code)]

mod access;
mod address_book;
mod addresses;
pub mod alerts;
pub mod arena;
pub mod backing;
pub mod capture;
pub mod captured;
pub mod census;
pub mod central;
mod checkpoint;
pub mod device;
pub mod everywhere;
mod gather;
mod growth;
pub mod history;
pub mod ladder;
pub mod lane;
mod latest;
pub mod lifetime;
mod mapping_book;
mod moves;
pub mod named;
mod number_set;
pub mod oom;
pub mod page_table;
mod pending;
pub mod phase;
mod pooled;
mod pools;
pub mod reclaim;
mod recycle;
pub mod reserve;
pub mod route;
mod segment_log;
pub mod size_class;
pub mod slab;
mod small_runs;
pub mod snapshot;
mod spaces;
pub mod stats;
pub mod stitch;
pub mod streams;
mod tag;
pub mod tally;
pub mod timed;
mod validate;
mod waits;
mod watcher;
mod watching;

use crate::config::Config;
use crate::config::record_dir::record_dir;
use crate::driver::{CaptureStatus, DeviceId, Driver, DriverError, StreamHandle};
use crate::nvtx;
use crate::record::facts::Process;
use crate::record::trace::{self, Tracer};
use crate::record::{DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, clock};
use backing::Kind;
use capture::{CapturePool, PoolId};
use central::Growth;
use device::{Device, Request, ceiling};
use lifetime::Lifetime;
use once_cell::race::OnceBox;
use page_table::{Owner, Page, PageTable};
pub(crate) use parking_lot::{Mutex, MutexGuard};
use phase::{Occasion, Phase};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use streams::{Resolved, Streams};
use timed::{OnRecord, Timed};

/// Devices that a process may use.
pub const MAX_DEVICES: u32 = 64;
/// The loader has wired record_stream.
pub const HOOK_RECORD_STREAM: u32 = 1;
/// The loader has wired the capture hooks (begin, end, release).
pub const HOOK_CAPTURES: u32 = 2;
/// The callers keep CUDA's own rules of order ([`Heap::announce_ordered_callers`]).
const ORDERED_CALLERS: u32 = 4;

/// Locks; a panic of another holder is no reason to stop serving, so these locks know none.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Why a request was not served.
#[derive(Debug)]
pub enum Error {
    /// No memory, after everything was tried.
    OutOfMemory(Box<oom::Report>),
    /// The driver failed in another way.
    Driver(DriverError),
    /// There is no such device.
    NoSuchDevice(i64),
    /// [`streams::MAX_STREAMS`] streams of a device were announced, or have blocks that are alive.
    TooManyStreams,
    /// What `reserve:` asks for could not be had.
    Reserve(Box<reserve::Refused>),
    /// An invariant of the heap is broken; what was asked for was not done.
    Internal(&'static str),
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory(report) => report.fmt(f),
            Self::Driver(error) => write!(f, "gruyere: the CUDA driver failed: {error}"),
            Self::NoSuchDevice(device) => write!(f, "gruyere: there is no device {device} in this process"),
            Self::TooManyStreams => write!(
                f,
                "gruyere: more than {} streams of one device have live blocks or were announced, or so many were seen and a capture \
                 keeps the allocator from looking which have none; create streams once and keep them",
                streams::MAX_STREAMS
            ),
            Self::Reserve(refused) => refused.fmt(f),
            Self::Internal(what) => write!(f, "gruyere: internal error: {what}; please report it"),
        }
    }
}

impl std::error::Error for Error {}

/// What the parts of a heap have in common.
pub struct Shared {
    /// The driver; its calls are timed where there is a record to say so.
    pub driver: Arc<dyn Driver>,
    /// The same without the detour, for what is asked on the hot path.
    questions: Arc<dyn Driver>,
    /// The configuration in force.
    pub config: Config,
    /// From addresses to owners.
    pub table: PageTable,
    /// What other processes read.
    pub record: &'static Record,
    /// Whether blocks from 1 MiB on get spans of their own.
    own_spans: bool,
    step: AtomicU32,
    /// What the loader has announced. States: bits are only ever set; but ORDERED_CALLERS goes once and for all when torch's hooks are met
    /// that nobody announced.
    hooks: AtomicU32,
}

impl Shared {
    /// The training step.
    #[inline]
    pub fn step(&self) -> u32 {
        self.step.load(Ordering::Relaxed)
    }

    /// Whether memory may pass from stream to stream: only where record_stream reaches us, or nobody needs it.
    pub fn shares(&self) -> bool {
        self.config.share && self.hooks.load(Ordering::Relaxed) & (HOOK_RECORD_STREAM | ORDERED_CALLERS) != 0
    }

    /// Whether the loader tells of every capture, or the callers do.
    pub fn hears_of_captures(&self) -> bool {
        self.hooks.load(Ordering::Relaxed) & (HOOK_CAPTURES | ORDERED_CALLERS) != 0
    }

    fn growth<'a>(&'a self, streams: &'a Streams, lifetime: Lifetime) -> Growth<'a> {
        Growth {
            driver: &*self.driver,
            table: &self.table,
            record: self.record,
            lifetime,
            capture: 0,
            fresh: u64::MAX,
            steal: false,
            lean: true,
            streams,
            completed: &|_| 0,
        }
    }
}

/// A bit of [`Heap::special`]: requests must ask whether their stream captures.
const WATCH_CAPTURES: u32 = 1;
/// `backing:passthrough` may be in force.
const PASSTHROUGH: u32 = 2;
/// A debugging switch is on.
const DEBUG: u32 = 4;
/// A history of blocks is kept.
const HISTORY: u32 = 8;
/// A trace is written.
const TRACE: u32 = 16;
/// Callers of CUDA's functions are served; torch's hooks, if they come too, have not been announced.
const UNANNOUNCED: u32 = 32;
/// Blocks from 1 MiB on get spans of their own.
const OWN_SPANS: u32 = 64;

/// The byte that `debug:poison` fills fresh blocks with.
pub const POISON_FRESH: u8 = 0xCD;
/// The byte that `debug:poison` fills freed blocks with.
pub const POISON_FREED: u8 = 0xDD;

/// Who owns an address.
pub enum Owned<'a> {
    /// A slab: the device, the lane and the slab's number there.
    Small(&'a Device, u32, u32),
    /// Large blocks: the device and the page.
    Large(&'a Device, Page<'a>),
}

/// The allocator of a process.
pub struct Heap {
    shared: Shared,
    /// By number, which has six bits in the page table. Those from `count` on stay empty.
    devices: [OnceBox<Device>; MAX_DEVICES as usize],
    count: u32,
    making: Mutex<()>,
    /// What takes requests off the straight path: a set of the bits above. WATCH_CAPTURES is set while the hooks are not
    /// announced or a bracket is open anywhere, HISTORY while a history is kept, UNANNOUNCED from the first call of a CUDA program until torch's hooks are
    /// announced or met; the others never change.
    special: AtomicU32,
    /// Brackets open on all devices; guards the setting of WATCH_CAPTURES.
    brackets: Mutex<u32>,
    bad_frees: AtomicU64,
    history: history::History,
    /// The trace that `trace:` asks for.
    trace: Option<Tracer>,
}

impl Heap {
    /// The heap over `driver`, and its record. No memory is taken from the driver yet.
    ///
    /// # Errors
    /// The driver's, where there is no device to be asked.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Self, DriverError> {
        if config.nvtx {
            nvtx::attach();
        }
        let count = driver.device_count()?.min(MAX_DEVICES);
        let facts: Vec<DeviceFacts> = (0..count)
            .map(|id| {
                driver.capabilities(id).map_or_else(
                    |_| DeviceFacts::default(),
                    |device| DeviceFacts {
                        name: device.name,
                        uuid: device.uuid,
                        total_memory: device.total_memory,
                    },
                )
            })
            .collect();
        let options = RecordOptions {
            enabled: config.record,
            directory: record_dir(),
            ring_events: config.ring_events,
            max_blocks: config.record_blocks,
            kept: config.records_kept as usize,
        };
        // Never freed: writers on threads that outlive main may still be in it.
        let record: &'static Record = Box::leak(Box::new(Record::create(&options, &facts)));
        let debug = config.debug.poison || config.debug.sync;
        let passthrough = config.backing == crate::config::Backing::Passthrough;
        let special =
            WATCH_CAPTURES | if passthrough { PASSTHROUGH } else { 0 } | if debug { DEBUG } else { 0 };
        let trace = config.trace.as_ref().and_then(|name| {
            let process = Process::current();
            Tracer::start(&trace::expand(name, process.pid, process.rank))
        });
        let special = special | if trace.is_some() { TRACE } else { 0 };
        Ok(Self {
            shared: Shared {
                driver: if config.record {
                    Arc::new(Timed::new(driver.clone(), OnRecord::new(record)))
                } else {
                    driver.clone()
                },
                questions: driver,
                config,
                table: PageTable::default(),
                record,
                own_spans: false,
                step: AtomicU32::new(0),
                hooks: AtomicU32::new(0),
            },
            devices: [const { OnceBox::new() }; MAX_DEVICES as usize],
            count,
            making: Mutex::new(()),
            special: AtomicU32::new(special),
            brackets: Mutex::new(0),
            bad_frees: AtomicU64::new(0),
            history: history::History::default(),
            trace,
        })
    }

    /// With `backing:fixed`, blocks from 1 MiB on get spans of their own from now on: CUDA's handles for other processes name whole
    /// allocations of the driver, and open at their starts. To be called before the first block is handed out.
    ///
    /// A span is the block's size rounded up to 2 MiB, and serves, once free, blocks of that very size, or goes back to the driver.
    pub fn give_blocks_spans_of_their_own(&mut self) {
        if self.shared.config.backing == crate::config::Backing::Fixed {
            self.shared.own_spans = true;
            self.special.fetch_or(OWN_SPANS, Ordering::AcqRel);
        }
    }

    /// The record.
    pub fn record(&self) -> &'static Record {
        self.shared.record
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The training step.
    pub fn step(&self) -> u32 {
        self.shared.step()
    }

    /// The driver's name of a device; empty where it has not been used.
    pub fn device_name(&self, id: DeviceId) -> String {
        let device = self.device_in_use(id.into()).ok().flatten();
        device.map_or_else(String::new, |device| device.capabilities.name.clone())
    }

    /// Devices that there are.
    pub fn device_count(&self) -> u32 {
        self.count
    }

    /// The heap of a device, made at its first use.
    #[inline]
    fn device(&self, id: i64) -> Result<&Device, Error> {
        match self.device_in_use(id)? {
            Some(device) => Ok(device),
            None => self.make_device(id as u32),
        }
    }

    /// The heap of a device, if it has been used.
    #[inline]
    fn device_in_use(&self, id: i64) -> Result<Option<&Device>, Error> {
        if !(0..i64::from(self.count)).contains(&id) {
            return Err(Error::NoSuchDevice(id));
        }
        Ok(self.devices[id as usize].get())
    }

    #[cold]
    fn make_device(&self, id: DeviceId) -> Result<&Device, Error> {
        let _making = lock(&self.making);
        let cell = &self.devices[id as usize];
        if cell.get().is_none() {
            let device = Device::new(&self.shared, id)?;
            {
                let mut central = lock(&device.central);
                let (limit, total) = (central.limit, device.capabilities.total_memory);
                central.gauges.set(&[(DeviceGauge::Limit, limit), (DeviceGauge::TotalMemory, total)]);
            }
            self.tell_of_history(&device);
            device.map_reserves(&self.shared)?;
            // Peers get access to each other's memory when the process begins to use both.
            for (other, cell) in self.devices.iter().enumerate() {
                let Some(peer) = cell.get() else { continue };
                let driver = &*self.shared.driver;
                if driver.can_access_peer(other as u32, id).unwrap_or(false) {
                    lock(&device.central).backing.allow_peer(driver, other as u32);
                }
                if driver.can_access_peer(id, other as u32).unwrap_or(false) {
                    lock(&peer.central).backing.allow_peer(driver, id);
                }
            }
            let _ = cell.set(Box::new(device));
        }
        cell.get().ok_or(Error::Internal("a device vanished"))
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter_map(OnceBox::get)
    }

    /// Whether nothing takes requests off the hot path: no debugging, no capture, all hooks wired.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.special.load(Ordering::Acquire) == 0
    }

    /// The hot path of [`Heap::malloc`] while [`Heap::is_plain`], for sizes above 0 that are `LARGE` ([`device::is_large`]) or not: 0 wherever
    /// something is out of the ordinary.
    #[inline(always)]
    pub fn serve<const LARGE: bool>(&self, size: u64, device: i32, stream: StreamHandle) -> u64 {
        let Some(device) = self.devices.get(device as usize).and_then(OnceBox::get) else { return 0 };
        let start = clock::now();
        let Some(number) = device.streams.resolve_lasting(&*self.shared.questions, stream) else { return 0 };
        let tags = lifetime::tags();
        if tags.is_routed() {
            return 0;
        }
        let request = Request { size, stream: number, lifetime: tags.lifetime(), start };
        let address = if LARGE {
            device.serve_large(&self.shared, request)
        } else {
            device.serve_small(&self.shared, request)
        };
        if address != 0 {
            sample_latency(self.shared.record, true, start);
        }
        address
    }

    /// `size` bytes on `device` in the order of `stream`, at a multiple of 512 B. Size 0 answers 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after everything was tried; the driver's errors; a device that there is not.
    pub fn malloc(&self, size: u64, device: i64, stream: StreamHandle) -> Result<u64, Error> {
        if size == 0 {
            return Ok(0);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let shared = &self.shared;
        let found = device.named(shared, stream)?;
        let tags = lifetime::tags();
        let request = Request { size, stream: found.number, lifetime: tags.lifetime(), start };
        let plain = self.special.load(Ordering::Acquire) & !UNANNOUNCED == 0;
        let address = if plain && !found.captures() && !tags.is_routed() {
            device.malloc(shared, request)?
        } else {
            self.malloc_special(device, request, stream, &found)?
        };
        sample_latency(shared.record, true, start);
        Ok(address)
    }

    #[cold]
    fn malloc_special(
        &self,
        device: &Device,
        request: Request,
        stream: StreamHandle,
        found: &Resolved<'_>,
    ) -> Result<u64, Error> {
        let shared = &self.shared;
        let special = self.special.load(Ordering::Acquire);
        if self.hooks() & (HOOK_RECORD_STREAM | HOOK_CAPTURES) != HOOK_RECORD_STREAM | HOOK_CAPTURES
            && self.hooks() & ORDERED_CALLERS == 0
        {
            self.warn_of_missing_hooks();
        }
        let watched = special & WATCH_CAPTURES != 0 && request.stream != streams::EVERY;
        let capture =
            if watched || found.captures() { device.capture_of(shared, stream, found)? } else { None };
        if capture.is_none() {
            self.forget_failed_captures(device);
        }
        if shared.config.debug.sync && capture.is_none() {
            device.synchronize(shared);
        }
        let address = match capture {
            // Whatever the backing: memory that a graph uses must stay when its block is freed.
            Some(capture) => device.malloc_captured(shared, request, capture)?,
            None if device.kind == Kind::Passthrough => device.malloc_direct(shared, request)?,
            None => match route::pool_on(device.id) {
                Some(pool) => device.malloc_pooled(shared, request, pool)?,
                None if shared.own_spans
                    && device.kind == Kind::Fixed
                    && request.size >= size_class::SMALL_MAX =>
                {
                    device.malloc_whole(shared, request)?
                }
                None => device.malloc(shared, request)?,
            },
        };
        if shared.config.debug.poison && capture.is_none() && request.stream != streams::EVERY {
            let result =
                shared.driver.memset(device.id, address, POISON_FRESH, lane::round(request.size), stream);
            if let Err(error) = result {
                log::warn!("debug:poison could not fill the block at {address:#x}: {error}");
            }
        }
        if special & HISTORY != 0 {
            self.note_malloc(device.id, address, request.size, stream);
        }
        if let Some(trace) = &self.trace {
            trace.malloc(address, request.size, device.id, request.stream);
        }
        Ok(address)
    }

    #[cold]
    fn warn_of_missing_hooks(&self) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        let hooks = self.hooks();
        let missing = [(HOOK_RECORD_STREAM, "record_stream"), (HOOK_CAPTURES, "CUDA graph captures")];
        let missing: Vec<&str> =
            missing.into_iter().filter(|hook| hooks & hook.0 == 0).map(|hook| hook.1).collect();
        let effect = |hook: u32, text: &'static str| if hooks & hook == 0 { text } else { "" };
        ONCE.call_once(|| {
            log::warn!(
                "not wired: {}.{}{} Set the hooks and call gruyere_announce_hooks(3) to have all of it.",
                missing.join(", "),
                effect(
                    HOOK_RECORD_STREAM,
                    " Memory stays with its stream, and Tensor.record_stream has no effect."
                ),
                effect(HOOK_CAPTURES, " Memory of CUDA graphs is never reused.")
            );
        });
    }

    /// Frees the block at `address`. Address 0 is fine; one that starts no live block is counted, logged and harmless (false).
    pub fn free(&self, address: u64) -> bool {
        let special = self.special.load(Ordering::Relaxed) & (DEBUG | HISTORY | TRACE);
        if special != 0 && address != 0 {
            self.before_free(address);
        }
        match self.find_owner(address) {
            Some(Owned::Small(device, lane, slab)) => self.free_small(device, lane, slab, address),
            Some(Owned::Large(device, page)) => self.free_large(device, page, address),
            None => self.free_other(address),
        }
    }

    /// Who owns `address`, for the free that follows at once; `None` wherever something is out of the ordinary: then [`Heap::free`] knows.
    #[inline(always)]
    pub fn owner(&self, address: u64) -> Option<Owned<'_>> {
        let special = self.special.load(Ordering::Relaxed) & (DEBUG | HISTORY | TRACE);
        if special != 0 { None } else { self.find_owner(address) }
    }

    #[inline(always)]
    fn find_owner(&self, address: u64) -> Option<Owned<'_>> {
        let page = self.shared.table.page(address)?;
        let word = page.word();
        let device = self.devices.get(word.device() as usize).and_then(OnceBox::get)?;
        match word.slab() {
            Some((lane, slab)) => Some(Owned::Small(device, lane, slab)),
            None => word.is_large().then_some(Owned::Large(device, page)),
        }
    }

    /// As [`Heap::free`], for what [`Heap::owner`] has found.
    #[inline(always)]
    pub fn free_small(&self, device: &Device, lane: u32, slab: u32, address: u64) -> bool {
        let start = clock::now();
        let done = device.free_small(&self.shared, lane, slab, address, start);
        self.freed(done, address, start)
    }

    /// As [`Heap::free`], for what [`Heap::owner`] has found.
    #[inline(always)]
    pub fn free_large(&self, device: &Device, page: Page<'_>, address: u64) -> bool {
        let start = clock::now();
        let done = device.free_large(page, address, start);
        self.freed(done, address, start)
    }

    #[inline(always)]
    fn freed(&self, done: Option<()>, address: u64, start: u64) -> bool {
        if done.is_none() {
            self.bad_pointer("free", address);
            return false;
        }
        sample_latency(self.shared.record, false, start);
        true
    }

    /// As [`Heap::free`], for what is in no page: address 0, a block of `backing:passthrough`, or a mistake.
    #[cold]
    #[inline(never)]
    fn free_other(&self, address: u64) -> bool {
        if address == 0 {
            return true;
        }
        let start = clock::now();
        let done = self.free_direct(address, start);
        self.freed(done, address, start)
    }

    fn free_direct(&self, address: u64, start: u64) -> Option<()> {
        if self.special.load(Ordering::Relaxed) & PASSTHROUGH == 0 {
            return None;
        }
        self.devices().find_map(|device| device.free_direct(&self.shared, address, start))
    }

    #[cold]
    #[inline(never)]
    fn bad_pointer(&self, call: &str, address: u64) {
        let count = self.bad_frees.fetch_add(1, Ordering::Relaxed) + 1;
        self.shared.record.event(EventKind::BadFree, 0, 0, 0, address, 0, clock::now());
        if let Some(device) = self.devices().next() {
            lock(&device.central).gauges.set(&[(DeviceGauge::BadFrees, count)]);
        }
        // One line for each of the first few; a program that does it in a loop must not fill the disk.
        if count <= 10 || count.is_power_of_two() {
            log::error!(
                "{call}({address:#x}): no live block of this allocator starts there (freed twice, or allocated by somebody else); \
                 ignored, {count} so far"
            );
        }
    }

    /// The history's, the trace's, and `debug:sync` and `debug:poison`, at a free.
    #[cold]
    fn before_free(&self, address: u64) {
        if self.has_history() {
            self.note_free(address);
        }
        if let Some(trace) = &self.trace {
            trace.free(address);
        }
        let shared = &self.shared;
        let owner = shared.table.get(address);
        let (Owner::Slab { device, .. } | Owner::Large { device, .. }) = owner else { return };
        let Ok(device) = self.device(i64::from(device)) else { return };
        if shared.config.debug.sync {
            device.synchronize(shared);
        }
        if shared.config.debug.poison
            && let Some(_asking) = device.ask()
            && let Some((stream, bytes)) = device.block_at(address, owner)
            && let Some(Err(error)) = device.streams.with_lasting(stream, |handle| {
                match shared.driver.capture_status(device.id, handle) {
                    Ok(CaptureStatus::None) => {
                        shared.driver.memset(device.id, address, POISON_FREED, bytes, handle)
                    }
                    _ => Ok(()),
                }
            })
        {
            log::warn!("debug:poison could not fill the freed block at {address:#x}: {error}");
        }
    }

    /// `stream` uses the block at `address` too: it is not reused before that stream is past its free. False: no live block
    /// starts there (counted and logged as a bad free is).
    pub fn record_stream(&self, address: u64, stream: StreamHandle) -> bool {
        if address == 0 {
            return true;
        }
        let owner = self.shared.table.get(address);
        let done = match owner {
            Owner::Slab { device, .. } | Owner::Large { device, .. } => {
                self.device(i64::from(device)).ok().and_then(|device| {
                    let named = device.named(&self.shared, stream).ok();
                    // The block must be kept from being reused too soon, number or not.
                    let user = named.as_ref().map_or(streams::EVERY, |found| found.number);
                    device.record_stream(address, owner, user)?;
                    if let Some(trace) = &self.trace {
                        trace.record_stream(address, device.id, user);
                    }
                    if matches!(owner, Owner::Large { .. }) {
                        device.seal_batch(&self.shared, Some(user));
                    }
                    let (kind, id) = (EventKind::RecordStream, device.id as u8);
                    self.shared.record.event(kind, id, 0, user, address, 0, clock::now());
                    Some(())
                })
            }
            Owner::None => self.devices().find_map(|device| device.record_stream(address, owner, 0)),
        };
        if done.is_none() {
            self.bad_pointer("record_stream", address);
        }
        done.is_some()
    }

    /// What the loader has wired: [`HOOK_RECORD_STREAM`], [`HOOK_CAPTURES`].
    ///
    /// Blocks may have been handed out, and uses of them by other streams lost, before record_stream was wired: what was enqueued until now is
    /// waited for, before memory passes from stream to stream.
    pub fn announce_hooks(&self, bits: u32) {
        if bits & HOOK_RECORD_STREAM != 0 && self.hooks() & HOOK_RECORD_STREAM == 0 {
            self.devices().for_each(|device| {
                device.synchronize(&self.shared);
            });
        }
        let brackets = lock(&self.brackets);
        let hooks = self.shared.hooks.fetch_or(bits, Ordering::AcqRel) | bits;
        if hooks & (HOOK_CAPTURES | ORDERED_CALLERS) != 0 && *brackets == 0 {
            self.special.fetch_and(!WATCH_CAPTURES, Ordering::AcqRel);
        }
        if hooks & HOOK_RECORD_STREAM != 0 {
            self.special.fetch_and(!UNANNOUNCED, Ordering::AcqRel);
        }
    }

    /// What was announced.
    pub fn hooks(&self) -> u32 {
        self.shared.hooks.load(Ordering::Relaxed)
    }

    /// A capture into pool `id` begins on a stream of `device`; called before the stream captures.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn begin_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let shared = &self.shared;
        self.forget_failed_captures(device);
        // While nothing captures yet, turn what is freed into events: afterwards nothing may be recorded.
        if let Some(_asking) = device.ask() {
            device.seal_all(shared, None);
        }
        device.stop_asking();
        let running = if lock(&device.central).captures.has_unmatched() {
            device.streams.running_captures(&*shared.driver)
        } else {
            Vec::new()
        };
        let mut central = lock(&device.central);
        central.captures.match_running(&running);
        let number = match central.captures.find(id) {
            Some(number) => number,
            None => {
                let space = central.arenas.add_space(true);
                central.captures.add(CapturePool::new(Some(id), space))
            }
        };
        central.captures.open(number);
        {
            let mut brackets = lock(&self.brackets);
            *brackets += 1;
            self.special.fetch_or(WATCH_CAPTURES, Ordering::AcqRel);
        }
        central.gauges.add(DeviceGauge::CapturesBegun, 1);
        drop(central);
        device.event(shared, EventKind::CaptureBegin, id.0, id.1);
        Ok(())
    }

    /// The bracket of pool `id` ends.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn end_allocate_to_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let closed = central.captures.find(id).is_some_and(|number| central.captures.close(number));
        if !closed {
            drop(central);
            log::warn!("end of an allocation to pool {id:?} that was not begun; ignored");
            return Ok(());
        }
        self.brackets_closed(device, 1);
        if central.backing.orphaned() > 0
            && let Some(_giving) = device.giving(&self.shared)
        {
            // What could not be given back during the capture.
            central.backing.trim(&*self.shared.driver);
            central.publish_reserved();
        }
        drop(central);
        device.event(&self.shared, EventKind::CaptureEnd, id.0, id.1);
        Ok(())
    }

    /// `count` brackets of `device` are closed.
    fn brackets_closed(&self, device: &Device, count: u32) {
        device.brackets.fetch_sub(count, Ordering::AcqRel);
        let mut brackets = lock(&self.brackets);
        *brackets = brackets.saturating_sub(count);
        if *brackets == 0 && self.shared.hears_of_captures() {
            self.special.fetch_and(!WATCH_CAPTURES, Ordering::AcqRel);
        }
    }

    /// Closes the brackets that this thread left open when its capture failed: torch does not, and nothing could be asked or waited for
    /// any more ([`capture::Captures::forget_failed`]). Costs a load where no bracket is open.
    fn forget_failed_captures(&self, device: &Device) {
        if device.may_ask() || !lock(&device.central).captures.has_own() {
            return;
        }
        // Those of other threads too: which stream is whose is not known.
        if !device.streams.none_captures(&*self.shared.driver) {
            return;
        }
        let forgotten = lock(&device.central).captures.forget_failed();
        if forgotten > 0 {
            self.brackets_closed(device, forgotten);
            log::debug!(
                "{forgotten} captures that failed on device {} are forgotten, and their memory is taken back",
                device.id
            );
        }
    }

    /// The graph that used pool `id` is gone; its blocks may still be live.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn release_pool(&self, device: i64, id: PoolId) -> Result<(), Error> {
        let device = self.device(device)?;
        let mut central = lock(&device.central);
        let number = central.captures.find(id);
        let Some(pool) = number.and_then(|number| central.captures.get_mut(number)) else {
            drop(central);
            log::warn!("release of pool {id:?}, which is not known; ignored");
            return Ok(());
        };
        pool.uses = pool.uses.saturating_sub(1);
        drop(central);
        device.event(&self.shared, EventKind::CaptureRelease, id.0, id.1);
        Ok(())
    }

    /// `empty_cache`: gives back to the driver what nobody uses, on all devices; the bytes that it got. Synchronises each device,
    /// unless something is capturing on it.
    pub fn trim(&self) -> u64 {
        let devices = self.devices().inspect(|device| self.forget_failed_captures(device));
        devices.map(|device| device.trim(&self.shared)).sum()
    }

    /// Caps what may be reserved on `device` at `fraction` of its memory, and at `limit:` if that is less.
    ///
    /// # Errors
    /// A device that there is not.
    pub fn set_memory_fraction(&self, fraction: f64, device: i64) -> Result<(), Error> {
        let device = self.device(device)?;
        let total = device.capabilities.total_memory;
        let configured = ceiling(&self.shared.config, &device.capabilities);
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 1.0 };
        let mut central = lock(&device.central);
        central.limit = configured.min((total as f64 * fraction) as u64);
        let limit = central.limit;
        central.gauges.set(&[(DeviceGauge::Limit, limit)]);
        Ok(())
    }

    /// The base and length of the region that holds `address`, for IPC by base pointers.
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        self.devices().find_map(|device| {
            let central = lock(&device.central);
            let direct =
                central.direct_blocks().find(|&(base, bytes)| (base..base + bytes).contains(&address));
            direct.or_else(|| {
                let mut regions = central.arenas.regions().map(|(_, region)| (region.address, region.bytes));
                regions.find(|&(base, bytes)| (base..base + bytes).contains(&address))
            })
        })
    }

    /// A training step (or a request of a server) is over.
    pub fn mark_step(&self) {
        let step = self.shared.step.fetch_add(1, Ordering::Relaxed) + 1;
        nvtx::mark(nvtx::What::Step, u64::from(step));
        if let Some(trace) = &self.trace {
            trace.step();
        }
        for device in self.devices() {
            if let Some(_asking) = device.ask() {
                let driver = &*self.shared.driver;
                device.streams.poll(driver);
                // With one stream there is nobody else to be served.
                if device.streams.count() > 1 && self.shared.shares() {
                    device.seal_all(&self.shared, None);
                }
            }
            lock(&device.central).gauges.set(&[(DeviceGauge::Step, u64::from(step))]);
            device.publish_gauges(&self.shared);
            device.event(&self.shared, EventKind::Step, 0, u64::from(step));
            device.watch(&self.shared, Occasion::Step);
        }
    }

    /// Brings the record's timeline up to now, as looks and growth do meanwhile.
    pub fn sample(&self) {
        for device in self.devices() {
            let central = &mut *lock(&device.central);
            central.gauges.sample(central.arenas.sample_busy_peak());
        }
    }

    /// Writes what waits to go to the trace's file, where there is one.
    pub fn flush_trace(&self) {
        if let Some(trace) = &self.trace {
            trace.flush();
        }
    }

    /// The program says what it does from now on; memory that it does not need for that goes back to the devices (`phase`).
    pub fn mark_phase(&self, phase: Phase) {
        for device in self.devices() {
            device.watch(&self.shared, Occasion::Mark(phase));
        }
    }

    /// Gives the driver's objects back and closes the record. The heap must not be used by anybody else any more, and no block
    /// of it by any stream.
    pub fn shut_down(&self) {
        for device in self.devices() {
            device.trim(&self.shared);
            device.streams.destroy_events(&*self.shared.driver);
            let mut central = lock(&device.central);
            if central.backing.held == 0 {
                central.backing.destroy(&*self.shared.driver);
            }
        }
        self.shared.record.close();
        self.flush_trace();
    }
}

/// One call in 64 is timed, chosen by the clock itself.
#[inline]
fn sample_latency(record: &Record, malloc: bool, start: u64) {
    if start >> 6 & 63 == 0 {
        note_latency(record, malloc, start);
    }
}

#[cold]
#[inline(never)]
fn note_latency(record: &Record, malloc: bool, start: u64) {
    record.latency(malloc, clock::now().wrapping_sub(start));
}
