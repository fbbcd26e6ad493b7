//! Keeping the history of blocks: it begins and ends, mallocs and frees are noted, and a reader
//! gets the entries in the order of time ([`super::books`] has the state).

use crate::device::Device;
use crate::driver::StreamHandle;
use crate::heap::{HISTORY, Heap};
use crate::journal::{Action, Entry, context, now};
use crate::pools::restore::{Plan, StateBlock};
use crate::report::books::{Books, Collected, LOOK_EVERY, Origin};
use crate::runs::arena::RunState;
use crate::runs::page_table::Owner;
use crate::sync::{MutexGuard, lock};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

impl Heap {
    /// Begins a history of at most `most` entries (0: only the origins of live blocks); new entries
    /// replace the oldest. Keeps earlier entries unless `clear`.
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

    /// Extends an ongoing history to a device that comes into use.
    pub(crate) fn tell_of_history(&self, device: &Device) {
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

    /// Whether a history is kept.
    pub fn has_history(&self) -> bool {
        self.special.load(Ordering::Relaxed) & HISTORY != 0
    }

    /// The history so far.
    pub fn history(&self) -> Collected {
        let mut books = lock(&self.history.0);
        self.end_waits(&mut books);
        // Memory comes before its block, even within one nanosecond. The sort is stable.
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

    /// Notes a new block.
    pub(crate) fn note_malloc(&self, device: u32, address: u64, size: u64, stream: StreamHandle) {
        let context = context();
        let mut books = lock(&self.history.0);
        // A new block at this address proves the wait of the old one over; the other waits are
        // checked in turns.
        books.end_wait(address);
        books.since += 1;
        if books.since > LOOK_EVERY.max(2 * books.waiting.len()) {
            self.end_waits(&mut books);
        }
        let stream = stream.0 as u64;
        books.latest.add(Entry {
            action: Action::Alloc,
            device,
            address,
            bytes: size,
            stream,
            time: now(),
            context,
            origin: 0,
        });
        books.origins.insert(address, (device, context));
    }

    /// Notes the coming free of the block at `address`, if there is one.
    pub(crate) fn note_free(&self, address: u64) {
        let owner = self.shared.table.get(address);
        let found = self.devices().find_map(|device| {
            let here = match owner {
                Owner::Slab { device: id, .. } | Owner::Large { device: id, .. } => id == device.id,
                Owner::None => true,
            };
            let facts = if here { device.block_at(address, owner) } else { None };
            facts.filter(|facts| !facts.is_pending).map(|facts| (device, facts))
        });
        let Some((device, facts)) = found else { return };
        let stream = device.streams.handle(facts.stream).map_or(0, |handle| handle.0 as u64);
        let mut books = lock(&self.history.0);
        let entry = Entry {
            action: Action::FreeRequested,
            device: device.id,
            address,
            bytes: facts.requested,
            stream,
            time: now(),
            context: context(),
            origin: books.origins.remove(&address).map_or(0, |(_, context)| context),
        };
        books.latest.add(entry);
        let entry = Entry { action: Action::FreeCompleted, ..entry };
        if facts.waits() {
            books.waiting.insert(address, entry);
        } else {
            books.latest.add(entry);
        }
    }

    pub(crate) fn history_books(&self) -> MutexGuard<'_, Books> {
        lock(&self.history.0)
    }

    /// Notes the restore of a pool: blocks freed and allocated in one step.
    pub(crate) fn note_restored(&self, books: &mut Books, device: &Device, done: &Plan) {
        let entry = |action, block: &StateBlock, origin| Entry {
            action,
            device: device.id,
            address: block.address,
            bytes: block.requested,
            stream: device.streams.handle(block.stream).map_or(0, |handle| handle.0 as u64),
            time: now(),
            context: context(),
            origin,
        };
        for block in &done.freed {
            let origin = books.origins.remove(&block.address).map_or(0, |(_, context)| context);
            books.latest.add(entry(Action::FreeRequested, block, origin));
            books.waiting.insert(block.address, entry(Action::FreeCompleted, block, origin));
        }
        self.end_waits(books);
        for block in &done.allocated {
            // A freed block at this address may still count as waiting.
            books.end_wait(block.address);
            books.latest.add(entry(Action::Alloc, block, 0));
            books.origins.insert(block.address, (device.id, context()));
        }
    }

    /// The large blocks that wait for streams, which have left the page table.
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
        device
            .and_then(|device| device.block_at(address, owner))
            .is_some_and(|facts| facts.is_pending)
    }

    /// Notes the end of the waits that are over.
    fn end_waits(&self, books: &mut Books) {
        let large = if books.waiting.is_empty() { HashSet::new() } else { self.large_pending() };
        let over = |&address: &u64| !large.contains(&address) && !self.is_small_pending(address);
        let done: Vec<u64> = books.waiting.keys().copied().filter(over).collect();
        done.into_iter().for_each(|address| books.end_wait(address));
        books.since = 0;
    }
}
