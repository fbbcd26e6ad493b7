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
use super::entry::now;
pub use super::entry::{Action, Entry, set_context};
use super::lane::{LANES, Lane};
use super::latest::Latest;
use super::named::NAMED_LANES;
use super::oom::Report;
use super::page_table::Owner;
use super::size_class::round;
use super::slab::SlotState;
use super::sync::{Mutex, lock};
use std::collections::HashMap;

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
pub(super) const LOOK_EVERY: usize = 256;

/// What is kept.
#[derive(Default)]
pub struct History(pub(super) Mutex<Books>);

#[derive(Default)]
pub(super) struct Books {
    pub(super) latest: Latest,
    /// Live blocks: device and context, by address.
    pub(super) origins: HashMap<u64, (u32, u64)>,
    /// Blocks freed by the program that wait for streams: the entry of their end, by address.
    pub(super) waiting: HashMap<u64, Entry>,
    /// Mallocs since the waits were last looked at.
    pub(super) since: usize,
    pub(super) latest_oom: Option<Report>,
}

impl Books {
    pub(super) fn end_wait(&mut self, address: u64) {
        if let Some(entry) = self.waiting.remove(&address) {
            self.latest.add(Entry { time: now(), ..entry });
        }
    }
}

/// A block, as the history needs it.
pub(super) struct Facts {
    pub(super) stream: u32,
    pub(super) bytes: u64,
    /// Its free would have to wait for other streams.
    pub(super) waits: bool,
    pub(super) is_pending: bool,
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
    pub(super) fn facts_at(&self, address: u64, owner: Owner) -> Option<Facts> {
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
