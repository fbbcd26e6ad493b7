//! Who decides where a block goes.
//!
//! [`Heap`] is the whole of it: one for the process, with a [`device::Device`] for each GPU in use. Requests up to 1 MiB are
//! served from slabs ([`slab`], [`lane`]) under the lock of their stream's lane; larger ones from runs ([`arena`]) under the device's central
//! lock. [`streams`] knows what stream order allows, [`supply`] gets memory from the driver and gives it back, [`reclaim`] finds some when there is
//! none, [`pool`] keeps the memory of CUDA graphs and of named pools apart.
//!
//! Locks, and the order in which they nest: a device's `recycling`; a lane's lock or the central lock, never both;
//! under either, the locks inside `streams` and the record's. No lock is held while the caller is answered.
//!
//! What it needs of others it is given: the [`driver`] as a trait, the [`settings`] as plain data, a [`profiler`] if there is one. It writes the record.
#![forbid(unsafe_code)]

mod address_book;
mod addresses;
pub mod alerts;
mod api;
pub mod arena;
mod asking;
pub mod backing;
mod bins;
mod bytes;
pub mod census;
pub mod central;
mod chunk;
pub mod device;
pub mod driver;
mod entry;
mod error;
pub mod everywhere;
mod gather;
mod growth;
pub mod history;
pub mod ladder;
pub mod lane;
mod latest;
pub mod lifetime;
mod mapping_book;
mod number_set;
pub mod oom;
pub mod page_table;
mod pending;
pub mod phase;
pub mod pool;
pub mod profiler;
mod request;
pub mod reserve;
pub mod route;
mod segment;
mod segment_log;
pub mod settings;
mod shared;
pub mod size_class;
pub mod slab;
mod small_runs;
pub mod snapshot;
mod spaces;
pub mod stats;
pub mod stitch;
pub mod streams;
pub mod supply;
mod sync;
pub mod tally;
pub mod timed;
mod waits;
mod watcher;
mod watching;

pub use api::{Heap, POISON_FREED, POISON_FRESH};
pub use device::Owned;
pub use error::Error;
pub use shared::{HOOK_CAPTURES, HOOK_RECORD_STREAM, MAX_DEVICES, Shared};
