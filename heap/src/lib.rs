//! Who decides where a block goes.
//!
//! [`Heap`] is the whole of it: one for the process, with a [`device::Device`] for each GPU in use.
//! Requests up to 16 KiB are served from slabs under the lock of their stream's shard, larger ones
//! from runs under the device's central lock.
//!
//! | folder | what it is |
//! |---|---|
//! | `api` | what callers say: it finds the device and notes what is to be noted |
//! | [`device`], `central` | what a device does, without and with its central lock, a file a concern |
//! | [`supply`] | how memory comes from the driver and goes back: remapped pages, spans, pass-through |
//! | [`policy`] | when memory is given back, and when somebody is told |
//! | [`pool`] | whose memory it is, and by which rules: ordinary, named, a graph's |
//! | [`order`] | what stream order allows |
//! | [`small`], [`runs`] | slabs and their slots; address book-keeping |
//! | [`report`] | what the heap says of itself |
//!
//! Locks, and the order in which they nest: a device's `recycling`; a shard's lock or the central
//! lock, never both; under either, the locks inside [`order::streams`] and the record's. No lock is
//! held while the caller is answered.
//!
//! What it needs of others it is given: the [`driver`] as a trait, the [`settings`] as plain data,
//! a [`profiler`] and who knows the [`sites`] of requests if there is one. It writes the record.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod bytes;
mod callers;
mod central;
mod device;
pub mod driver;
mod error;
mod heap;
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
mod sites;
mod small;
mod supply;
mod sync;
mod upkeep;

pub use callers::cuda::{OwnedBlock, SyncPoint};
pub use device::{Device, Owned, is_large};
pub use error::Error;
pub use heap::{Heap, POISON_FREED, POISON_FRESH};
pub use order::streams::MAX_STREAMS;

pub use bytes::Bytes;
pub use lifetime::Lifetime;
pub use pools::capture::PoolId;
pub use pools::key::{LiveBlock, PoolError, PoolKey, PoolStats};
pub use pools::restore::{Obstacle, PoolState, Restored, StateError};
pub use report::cause::Report;
pub use report::stats::{CapturePoolHeld, Stats, TorchStats};
pub use report::{rungs, segment_stats, snapshot};
pub use runs::page_table::Page;
pub use shared::{HOOK_CAPTURES, HOOK_RECORD_STREAM, MAX_DEVICES};
pub use sites::Sites;
pub use small::size_class::{ALIGNMENT, PAGE, SMALL_MAX};
pub use supply::pages_fit;
pub use upkeep::alerts::{ALERTS, Alert, AlertKind, Listener};
pub use upkeep::phase::Phase;

/// The memory history: what torch calls `_record_memory_history`.
pub mod history {
    pub use crate::journal::{Action, Entry, set_context};
    pub use crate::report::books::{Collected, Origin};
}
