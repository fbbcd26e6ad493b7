//! The heap: decides where a block goes.
//!
//! Three structures hold the state, each with its locks and nothing else:
//!
//! | structure | file | what it is |
//! |---|---|---|
//! | [`Heap`] | `heap.rs` | a process: its devices, what they share, the trace and the history |
//! | [`Device`] | `device.rs` | a GPU: its streams, its shards of small blocks, its supply of memory |
//! | `Central` | `central.rs` | what the streams of a device share, behind one lock |
//!
//! What they do stands in *slices*. A file of a slice is a feature: it holds the feature's
//! `impl Heap`, `impl Device` and `impl Central` together.
//!
//! | slice | what it does |
//! |---|---|
//! | `path` | malloc and free, from the call to the arena; the reclaim ladder; out-of-memory |
//! | `pools` | named pools, the private memory of CUDA graphs, pools with segments from outside |
//! | `supply` | gets memory from the driver and gives it back: pages that move, spans, pass-through |
//! | `upkeep` | steps, low-memory phases, reserves, thresholds, trims |
//! | `sharing` | memory that other processes map, and theirs that this one maps |
//! | `callers` | what CUDA programs and watched programs need; the rules of order that callers keep |
//! | `report` | walks all that a device has: statistics, snapshots, validation |
//!
//! The *books* lie below the slices and know none of the three structures:
//!
//! | book | what it keeps |
//! |---|---|
//! | `small` | size classes, slabs, shards |
//! | `runs` | arenas: runs, regions, spaces; the page table |
//! | `order` | streams, epochs, events, frees that wait |
//! | [`driver`] | the trait over the driver, its errors, the clock around it |
//!
//! Requests up to 16 KiB get a slot of a slab under the lock of their stream's shard, larger ones a
//! run under the device's central lock.
//!
//! Locks nest in this order: a device's `recycling`; then a shard's lock or the central lock, never
//! both; under either, the locks inside `order::streams` and the record's. The caller is answered
//! with no lock held. The table of all locks is in docs/architecture.md.
//!
//! The heap is given what it needs: the [`driver`], a [`profiler`] and a source of [`Sites`] as
//! traits, the [`settings`] as plain data. It writes the record.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod callers;
mod central;
mod device;
pub mod driver;
mod error;
mod heap;
mod hook_bits;
mod journal;
pub mod lifetime;
mod number_set;
mod order;
mod path;
mod pools;
pub mod profiler;
mod report;
mod request;
mod runs;
pub mod settings;
mod shared;
mod sharing;
mod sites;
mod small;
mod supply;
mod sync;
mod upkeep;

pub use callers::cuda::{OwnedBlock, SyncPoint};
pub use callers::program_waits::Mark;
pub use device::{Device, Owned, is_large};
pub use error::Error;
pub use heap::{Heap, POISON_FREED, POISON_FRESH};
pub use hook_bits::{HOOK_CAPTURES, HOOK_RECORD_STREAM};
pub use order::streams::MAX_STREAMS;

pub use gruyere_record::size::Bytes;
pub use lifetime::Lifetime;
pub use pools::capture::PoolId;
pub use pools::key::{LiveBlock, PoolError, PoolKey, PoolStats};
pub use pools::restore::{Obstacle, PoolState, Restored, StateError};
pub use report::cause::Report;
pub use report::stats::{CapturePoolHeld, Stats, TorchStats};
pub use report::{rungs, segment_stats, snapshot};
pub use runs::page_table::Page;
pub use shared::MAX_DEVICES;
pub use sharing::exports::{Export, Extent, NotExported};
pub use sharing::foreign::{ChunkFile, NextChunk, NotImported};
pub use sites::Sites;
pub use small::size_class::{ALIGNMENT, PAGE, SMALL_MAX};
pub use supply::pages_fit;
pub use upkeep::alerts::{ALERTS, Alert, AlertKind, Listener};
pub use upkeep::phase::Phase;

/// The memory history, torch's `_record_memory_history`.
pub mod history {
    pub use crate::journal::{Action, Entry, set_context};
    pub use crate::report::books::{Collected, Origin};
}
