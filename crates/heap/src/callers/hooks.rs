//! The rules of stream order that the callers keep: torch's hooks, or CUDA's own.
//!
//! Until the loader announces the hooks ([`Heap::announce_hooks`]), memory stays with its stream. A
//! door for CUDA programs announces CUDA's rules instead ([`Heap::announce_ordered_callers`]).

use crate::heap::{Heap, UNANNOUNCED, WATCH_CAPTURES};
use crate::hook_bits::{HOOK_CAPTURES, HOOK_RECORD_STREAM, ORDERED_CALLERS};
use crate::sync::lock;
use std::sync::atomic::Ordering;

impl Heap {
    /// Notes the hooks that the loader has wired: [`HOOK_RECORD_STREAM`], [`HOOK_CAPTURES`].
    ///
    /// Before record_stream was wired, the heap may have served blocks and missed uses of them by
    /// other streams: so it waits for all work enqueued until now before memory passes between
    /// streams.
    pub fn announce_hooks(&self, bits: u32) {
        if bits & HOOK_RECORD_STREAM != 0 && self.hooks() & HOOK_RECORD_STREAM == 0 {
            self.devices().for_each(|device| {
                device.synchronize(&self.shared);
            });
        }
        let pool_scopes = lock(&self.pool_scopes);
        let hooks = self.shared.hooks.fetch_or(bits, Ordering::AcqRel) | bits;
        if hooks & (HOOK_CAPTURES | ORDERED_CALLERS) != 0 && *pool_scopes == 0 {
            self.special.fetch_and(!WATCH_CAPTURES, Ordering::AcqRel);
        }
        if hooks & HOOK_RECORD_STREAM != 0 {
            self.special.fetch_and(!UNANNOUNCED, Ordering::AcqRel);
            self.devices().for_each(|device| device.streams.doubt_all());
        }
    }

    /// The announced hooks.
    pub fn hooks(&self) -> u32 {
        self.shared.hooks.load(Ordering::Relaxed)
    }

    /// From now on CUDA's own rules order all frees, so that memory may pass between streams
    /// without record_stream, and [`Heap::capture_begins`] announces captures. Call before the
    /// first malloc.
    ///
    /// If torch's hooks come too, unannounced ([`Heap::announce_hooks`]), that ends: their callers
    /// promise less.
    pub fn announce_ordered_callers(&self) {
        if self.hooks() & (ORDERED_CALLERS | HOOK_RECORD_STREAM) == 0 {
            self.special.fetch_or(UNANNOUNCED, Ordering::AcqRel);
        }
        self.announce_hooks(ORDERED_CALLERS);
    }

    /// Notes a malloc through torch's hooks. After the first, costs one load.
    pub fn meet_hooks(&self) {
        if self.special.load(Ordering::Acquire) & UNANNOUNCED == 0 {
            return;
        }
        let _pool_scopes = lock(&self.pool_scopes);
        if self.special.fetch_and(!UNANNOUNCED, Ordering::AcqRel) & UNANNOUNCED != 0 {
            // From now on torch's frees stay with their stream, and the driver is asked about
            // captures.
            self.shared.hooks.fetch_and(!ORDERED_CALLERS, Ordering::AcqRel);
            self.special.fetch_or(WATCH_CAPTURES, Ordering::AcqRel);
        }
    }

    #[cold]
    pub(crate) fn warn_of_missing_hooks(&self) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        let hooks = self.hooks();
        let missing =
            [(HOOK_RECORD_STREAM, "record_stream"), (HOOK_CAPTURES, "CUDA graph captures")];
        let missing: Vec<&str> =
            missing.into_iter().filter(|hook| hooks & hook.0 == 0).map(|hook| hook.1).collect();
        let effect = |hook: u32, text: &'static str| if hooks & hook == 0 { text } else { "" };
        ONCE.call_once(|| {
            log::warn!(
                "hooks not wired: {}.{}{} Wire them and call gruyere_announce_hooks(3) (a C \
                 program without torch: its rules are in gruyere.h).",
                missing.join(", "),
                effect(
                    HOOK_RECORD_STREAM,
                    " Memory stays with its stream, and torch's Tensor.record_stream has no effect."
                ),
                effect(HOOK_CAPTURES, " Memory of CUDA graphs is never reused.")
            );
        });
    }
}
