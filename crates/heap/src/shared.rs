//! What the parts of a heap share.

use crate::driver::Driver;
use crate::hook_bits::{HOOK_CAPTURES, HOOK_RECORD_STREAM, ORDERED_CALLERS};
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

/// What the parts of a heap share.
pub(crate) struct Shared {
    /// The driver; a heap with a record times its calls.
    pub(crate) driver: Arc<dyn Driver>,
    /// The same driver untimed, for the questions of the hot path.
    pub(super) questions: Arc<dyn Driver>,
    pub(crate) settings: Settings,
    /// From addresses to owners.
    pub(crate) table: PageTable,
    pub(crate) record: &'static Record,
    /// Whether blocks from 1 MiB on get dedicated allocations.
    pub(super) dedicated: bool,
    /// The source of requests' sites.
    pub(super) sites: Option<Box<dyn Sites>>,
    pub(super) step: AtomicU32,
    /// What the loader has announced. States: bits are only set; but ORDERED_CALLERS goes for ever
    /// when torch's hooks come unannounced.
    pub(super) hooks: Arc<AtomicU32>,
    /// Whether streams may wait for each other before memory is exhausted (`waits:auto`).
    pub(super) permission: Permission,
}

impl Shared {
    /// The site of the calling thread, with a request of `bytes`; 0: with none. Call it with no
    /// lock of the heap held.
    pub(super) fn site(&self, bytes: u64) -> SiteId {
        self.sites.as_ref().map_or(SiteId::NONE, |sites| sites.current(self.record, bytes))
    }

    #[inline]
    pub(crate) fn step(&self) -> u32 {
        self.step.load(Ordering::Relaxed)
    }

    /// Whether memory may pass from stream to stream: only if record_stream reaches the allocator,
    /// or no caller needs it.
    pub(crate) fn shares(&self) -> bool {
        self.settings.share
            && self.hooks.load(Ordering::Relaxed) & (HOOK_RECORD_STREAM | ORDERED_CALLERS) != 0
    }

    /// Whether streams may wait for each other to hold less, and not only to avoid out of memory.
    pub(super) fn waits_to_hold_less(&self) -> bool {
        match self.settings.waits {
            Waits::Auto => self.permission.is_given(),
            Waits::Budget => true,
            Waits::Off | Waits::OutOfMemory => false,
        }
    }

    /// Whether the loader or the callers announce every capture.
    pub(crate) fn hears_of_captures(&self) -> bool {
        self.hooks.load(Ordering::Relaxed) & (HOOK_CAPTURES | ORDERED_CALLERS) != 0
    }
}
