//! The history of blocks, while somebody asks for it: what torch calls `_record_memory_history`.
//!
//! Off, it costs nothing: it hangs on the branches that requests take for special reasons anyway. On, each malloc and free adds an entry
//! under one lock, which nobody takes with a lock of the heap held. Where a block was allocated in the program is told by a
//! number, the thread's *context*, which the loader sets around the calls that it knows of (a loader for Python cannot be asked
//! from here: requests come with and without Python's global lock). A free is noted before it is done, and a malloc after, so that the
//! entries of one address are in order whatever threads do.
#![deny(unsafe_code)]

use super::arena::RunState;
use super::device::Device;
use super::lane::{LANES, Lane, round};
use super::latest::Latest;
use super::named::NAMED_LANES;
use super::oom::Report;
use super::page_table::Owner;
use super::slab::SlotState;
use super::{HISTORY, Heap, Mutex, lock};
use crate::driver::StreamHandle;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

thread_local! {
    // A plain cell without a destructor, so late calls on a dying thread are safe.
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
}

/// What the calling thread's requests are noted with from now on; 0: nothing. Answers what it was.
pub fn set_context(context: u64) -> u64 {
    CONTEXT.with(|cell| cell.replace(context))
}

/// See [`set_context`].
pub(super) fn context() -> u64 {
    CONTEXT.with(Cell::get)
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Action {
    /// A block was handed out.
    Alloc = 0,
    /// The program freed a block.
    FreeRequested = 1,
    /// The block can be used again: at once, or when the streams that used it are past it.
    FreeCompleted = 2,
    /// Memory came from the driver, in one piece with an address of its own: a span.
    SegmentAlloc = 3,
    /// It went back.
    SegmentFree = 4,
    /// A request could not be met.
    OutOfMemory = 5,
    /// Pages are at this address now: new ones, or from elsewhere.
    SegmentMap = 6,
    /// They are not any more.
    SegmentUnmap = 7,
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened.
    pub action: Action,
    /// The device.
    pub device: u32,
    /// Where; of an out-of-memory, what the driver says is free (bytes).
    pub address: u64,
    /// How much, rounded up to 512 B.
    pub bytes: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Nanoseconds since 1970.
    pub time: u64,
    /// See [`set_context`].
    pub context: u64,
}

/// A block that was allocated while the history was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Where it starts.
    pub address: u64,
    /// Its device.
    pub device: u32,
    /// See [`set_context`].
    pub context: u64,
}

/// All that is known.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// By time.
    pub entries: Vec<Entry>,
    /// Entries that there was no room for.
    pub lost: u64,
    /// Where the live blocks came from, as far as that is known.
    pub origins: Vec<Origin>,
}

/// Mallocs between two looks at what waits, at least.
const LOOK_EVERY: usize = 256;

/// What is kept.
#[derive(Default)]
pub struct History(Mutex<Books>);

#[derive(Default)]
struct Books {
    latest: Latest,
    /// Live blocks: device and context, by address.
    origins: HashMap<u64, (u32, u64)>,
    /// Blocks freed by the program that wait for streams: the entry of their end, by address.
    waiting: HashMap<u64, Entry>,
    /// Mallocs since the waits were last looked at.
    since: usize,
    latest_oom: Option<Report>,
}

impl Books {
    fn end_wait(&mut self, address: u64) {
        if let Some(entry) = self.waiting.remove(&address) {
            self.latest.add(Entry { time: now(), ..entry });
        }
    }

    /// Notes the end of the waits that are over.
    fn end_waits(&mut self, heap: &Heap) {
        let large = if self.waiting.is_empty() { HashSet::new() } else { heap.large_pending() };
        let over = |&address: &u64| !large.contains(&address) && !heap.is_small_pending(address);
        let done: Vec<u64> = self.waiting.keys().copied().filter(over).collect();
        done.into_iter().for_each(|address| self.end_wait(address));
        self.since = 0;
    }
}

/// Nanoseconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// A block, as the history needs it.
struct Facts {
    stream: u32,
    bytes: u64,
    /// Its free would have to wait for other streams.
    waits: bool,
    is_pending: bool,
}

fn slab_facts(lane: &Lane, slab: u32, address: u64, frozen: bool) -> Option<Facts> {
    let slab = lane.slab(slab)?;
    let slot = slab.slot_at(address)?;
    let state = slab.state(slot);
    let waits = frozen || lane.is_used_elsewhere(address);
    let is_pending = state == SlotState::Pending;
    let bytes = round(slab.facts(slot).requested);
    (state != SlotState::Free).then_some(Facts { stream: slab.stream, bytes, waits, is_pending })
}

impl Device {
    fn facts_at(&self, address: u64, owner: Owner) -> Option<Facts> {
        match owner {
            Owner::Slab { lane, slab, .. } if (lane as usize) < LANES => {
                slab_facts(&lock(&self.lanes[lane as usize]).lane, slab, address, false)
            }
            Owner::Slab { lane, slab, .. } if lane >= NAMED_LANES => {
                let central = lock(&self.central);
                let pool = central.named.get(lane - NAMED_LANES)?;
                slab_facts(&pool.lane, slab, address, false)
            }
            Owner::Slab { lane, slab, .. } => {
                let mut central = lock(&self.central);
                let pool = central.captures.get_mut(lane - LANES as u32)?;
                slab_facts(&pool.lane, slab, address, pool.frozen)
            }
            Owner::Large { blocks, .. } => {
                let central = lock(&self.central);
                let (_, run) = central.run_at(address, blocks).filter(|(_, run)| !run.is_slab)?;
                let space = central.arenas.region(run.region).space;
                let frozen =
                    central.captures.pools.iter().flatten().any(|pool| pool.frozen && pool.space == space);
                let is_pending = run.state == RunState::Pending;
                let is_block = is_pending || run.state == RunState::Live;
                is_block.then_some(Facts {
                    stream: run.stream,
                    bytes: run.bytes,
                    waits: run.shared || frozen,
                    is_pending,
                })
            }
            Owner::None => {
                let bytes = lock(&self.central).direct_blocks().find(|block| block.0 == address)?.1;
                Some(Facts { stream: 0, bytes, waits: false, is_pending: false })
            }
        }
    }
}

impl Heap {
    /// Begins a history of at most `most` entries (0: of where live blocks came from only); older ones make room. What was noted
    /// before stays, unless `clear` says otherwise.
    pub fn start_history(&self, most: usize, clear: bool) {
        // No device comes into use meanwhile.
        let _making = lock(&self.making);
        let mut books = lock(&self.history.0);
        let clear = clear || !self.has_history();
        if clear {
            *books = Books { latest_oom: books.latest_oom.take(), ..Books::default() };
        }
        books.latest.keep(most);
        for device in self.devices() {
            lock(&device.central).backing.keep_log(most, clear);
        }
        self.special.fetch_or(HISTORY, Ordering::AcqRel);
    }

    /// A device comes into use: if there is a history, it is one of it too.
    pub(super) fn tell_of_history(&self, device: &Device) {
        if self.has_history() {
            let most = lock(&self.history.0).latest.most();
            lock(&device.central).backing.keep_log(most, true);
        }
    }

    /// Ends the history and forgets it.
    pub fn stop_history(&self) {
        let _making = lock(&self.making);
        self.special.fetch_and(!HISTORY, Ordering::AcqRel);
        let mut books = lock(&self.history.0);
        *books = Books { latest_oom: books.latest_oom.take(), ..Books::default() };
        for device in self.devices() {
            lock(&device.central).backing.keep_log(0, true);
        }
    }

    /// Whether there is a history.
    pub fn has_history(&self) -> bool {
        self.special.load(Ordering::Relaxed) & HISTORY != 0
    }

    /// What the history knows by now.
    pub fn history(&self) -> Collected {
        let mut books = lock(&self.history.0);
        books.end_waits(self);
        // Memory comes before the block that it is for, so of one nanosecond too. The sort is stable.
        let (mut entries, mut lost) = (Vec::new(), 0);
        for device in self.devices() {
            let central = lock(&device.central);
            for log in central.backing.logs() {
                let (told, gone) = log.told();
                entries.extend(told);
                lost += gone;
            }
        }
        let (told, gone) = books.latest.told();
        entries.extend(told);
        lost += gone;
        entries.sort_by_key(|entry| entry.time);
        let excess = entries.len().saturating_sub(books.latest.most());
        entries.drain(..excess);
        lost += excess as u64;
        let origin = |(&address, &(device, context))| Origin { address, device, context };
        Collected { entries, lost, origins: books.origins.iter().map(origin).collect() }
    }

    /// A block was handed out.
    pub(super) fn note_malloc(&self, device: u32, address: u64, size: u64, stream: StreamHandle) {
        let (bytes, context) = (round(size), context());
        let mut books = lock(&self.history.0);
        // A block that lies there now shows that the wait of the one before is over; the others are asked in turns.
        books.end_wait(address);
        books.since += 1;
        if books.since > LOOK_EVERY.max(2 * books.waiting.len()) {
            books.end_waits(self);
        }
        let stream = stream.0 as u64;
        books.latest.add(Entry {
            action: Action::Alloc,
            device,
            address,
            bytes,
            stream,
            time: now(),
            context,
        });
        books.origins.insert(address, (device, context));
    }

    /// The block at `address` is about to be freed, if there is one.
    pub(super) fn note_free(&self, address: u64) {
        let owner = self.shared.table.get(address);
        let found = self.devices().find_map(|device| {
            let here = match owner {
                Owner::Slab { device: id, .. } | Owner::Large { device: id, .. } => id == device.id,
                Owner::None => true,
            };
            let facts = if here { device.facts_at(address, owner) } else { None };
            facts.filter(|facts| !facts.is_pending).map(|facts| (device, facts))
        });
        let Some((device, facts)) = found else { return };
        let stream = device.streams.handle(facts.stream).map_or(0, |handle| handle.0 as u64);
        let entry = Entry {
            action: Action::FreeRequested,
            device: device.id,
            address,
            bytes: facts.bytes,
            stream,
            time: now(),
            context: context(),
        };
        let mut books = lock(&self.history.0);
        books.origins.remove(&address);
        books.latest.add(entry);
        let entry = Entry { action: Action::FreeCompleted, ..entry };
        if facts.waits {
            books.waiting.insert(address, entry);
        } else {
            books.latest.add(entry);
        }
    }

    /// The large blocks that wait for streams. The page table does not know them any more.
    fn large_pending(&self) -> HashSet<u64> {
        let mut found = HashSet::new();
        for device in self.devices() {
            let central = lock(&device.central);
            let pending = central.arenas.blocks().filter(|(_, run)| run.state == RunState::Pending);
            found.extend(pending.map(|(_, run)| run.address));
        }
        found
    }

    fn is_small_pending(&self, address: u64) -> bool {
        let owner = self.shared.table.get(address);
        let Owner::Slab { device, .. } = owner else { return false };
        let device = self.devices.get(device as usize).and_then(|cell| cell.get());
        device.and_then(|device| device.facts_at(address, owner)).is_some_and(|facts| facts.is_pending)
    }

    /// A request was answered with out of memory.
    pub fn note_out_of_memory(&self, report: &Report, stream: StreamHandle) {
        let mut books = lock(&self.history.0);
        books.latest_oom = Some(report.clone());
        if self.has_history() {
            books.latest.add(Entry {
                action: Action::OutOfMemory,
                device: report.device,
                address: report.free.unwrap_or(0),
                bytes: round(report.asked),
                stream: stream.0 as u64,
                time: now(),
                context: context(),
            });
        }
    }

    /// The latest out-of-memory.
    pub fn latest_out_of_memory(&self) -> Option<Report> {
        lock(&self.history.0).latest_oom.clone()
    }
}
