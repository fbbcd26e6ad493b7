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

mod callers;
mod central;
pub mod device;
pub mod driver;
mod error;
mod heap;
mod number_set;
pub mod order;
pub mod path;
pub mod pools;
pub mod profiler;
pub mod report;
mod request;
pub mod runs;
pub mod settings;
mod shared;
pub mod sites;
pub mod small;
pub mod supply;
mod sync;
pub mod upkeep;

pub use device::Owned;
pub use error::Error;
pub use heap::{Heap, POISON_FREED, POISON_FRESH};
pub use shared::{HOOK_CAPTURES, HOOK_RECORD_STREAM, MAX_DEVICES};
