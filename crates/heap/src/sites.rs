//! The source of requests' sites, if the process has one.
//!
//! The heap gets it before its first block, and asks it on the requesting thread: once for each
//! block above 16 KiB (or each block, if so wanted), when the block is found and no lock of the
//! heap is held, and before it makes a slab. The source may take its time, allocate and free.
//! Without one, a large request pays a load and a branch.

use gruyere_record::Record;
use gruyere_record::sites::SiteId;

/// A source of sites: knows where in its program the calling thread is.
pub trait Sites: Send + Sync {
    /// The calling thread's site, by `record`'s number, with a request of `bytes`; 0: with none.
    fn current(&self, record: &Record, bytes: u64) -> SiteId;
}
