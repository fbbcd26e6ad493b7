//! Where in the program requests come from, where somebody knows.
//!
//! Who knows is given to the heap before its first block, and asked on the thread that makes the
//! request: once for each block above 16 KiB (or each block, if so wanted), when it has been found
//! and no lock of the heap is held, and before a slab is made. It may take its time, allocate and
//! free. Without one, a large request pays a load and a branch.

use gruyere_record::Record;
use gruyere_record::sites::SiteId;

/// Who knows where the calling thread is in its program.
pub trait Sites: Send + Sync {
    /// Where that is, as `record` calls it, with a request of `bytes`; 0: with none.
    fn current(&self, record: &Record, bytes: u64) -> SiteId;
}
