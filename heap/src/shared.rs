//! What the parts of a heap have in common.

use crate::driver::Driver;
use crate::order::waits::Permission;
use crate::runs::page_table::PageTable;
use crate::settings::{Settings, Waits};
use crate::sites::Sites;
use gruyere_record::Record;
use gruyere_record::sites::SiteId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Devices that a process may use.
pub const MAX_DEVICES: u32 = 64;
/// The loader has wired record_stream.
pub const HOOK_RECORD_STREAM: u32 = 1;
/// The loader has wired the capture hooks (begin, end, release).
pub const HOOK_CAPTURES: u32 = 2;
/// The callers keep CUDA's own rules of order ([`crate::heap::Heap::announce_ordered_callers`]).
pub(super) const ORDERED_CALLERS: u32 = 4;

/// What the parts of a heap have in common.
pub(crate) struct Shared {
    /// The driver; its calls are timed where there is a record to say so.
    pub(crate) driver: Arc<dyn Driver>,
    /// The same without the detour, for what is asked on the hot path.
    pub(super) questions: Arc<dyn Driver>,
    pub(crate) settings: Settings,
    /// From addresses to owners.
    pub(crate) table: PageTable,
    pub(crate) record: &'static Record,
    /// Whether blocks from 1 MiB on get dedicated allocations.
    pub(super) dedicated: bool,
    /// Who knows where requests come from.
    pub(super) sites: Option<Box<dyn Sites>>,
    pub(super) step: AtomicU32,
    /// What the loader has announced. States: bits are only ever set; but ORDERED_CALLERS goes once
    /// and for all when torch's hooks are met that nobody announced.
    pub(super) hooks: AtomicU32,
    /// Whether streams may wait for each other before memory is exhausted (`waits:auto`).
    pub(super) permission: Permission,
}

impl Shared {
    /// Where the calling thread's request of `bytes` comes from; 0: it has none. To be asked with
    /// no lock of the heap held.
    pub(super) fn site(&self, bytes: u64) -> SiteId {
        self.sites.as_ref().map_or(SiteId::NONE, |sites| sites.current(self.record, bytes))
    }

    #[inline]
    pub(crate) fn step(&self) -> u32 {
        self.step.load(Ordering::Relaxed)
    }

    /// Whether memory may pass from stream to stream: only where record_stream reaches us, or
    /// nobody needs it.
    pub(crate) fn shares(&self) -> bool {
        self.settings.share
            && self.hooks.load(Ordering::Relaxed) & (HOOK_RECORD_STREAM | ORDERED_CALLERS) != 0
    }

    /// Whether streams may wait for each other to hold less, and not only where the alternative is
    /// out of memory.
    pub(super) fn waits_to_hold_less(&self) -> bool {
        match self.settings.waits {
            Waits::Auto => self.permission.is_given(),
            Waits::Budget => true,
            Waits::Off | Waits::OutOfMemory => false,
        }
    }

    /// Whether the loader tells of every capture, or the callers do.
    pub(crate) fn hears_of_captures(&self) -> bool {
        self.hooks.load(Ordering::Relaxed) & (HOOK_CAPTURES | ORDERED_CALLERS) != 0
    }
}
