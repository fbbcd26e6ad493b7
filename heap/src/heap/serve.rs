//! Mallocs.

use super::{ALL_SITES, HISTORY, Heap, POISON_FRESH, UNANNOUNCED, WATCH_CAPTURES};
use crate::device::{Device, is_large};
use crate::driver::StreamHandle;
use crate::error::Error;
use crate::order::streams;
use crate::order::streams::Resolved;
use crate::pools::capture::PoolId;
use crate::pools::{lifetime, route};
use crate::request::Request;
use crate::shared::{HOOK_CAPTURES, HOOK_RECORD_STREAM, ORDERED_CALLERS};
use crate::small::size_class::round;
use crate::supply::Way;
use gruyere_record::sites::SiteId;
use gruyere_record::{Record, clock};
use once_cell::race::OnceBox;
use std::sync::atomic::Ordering;

impl Heap {
    /// Whether nothing takes requests off the hot path: no debugging, no capture, all hooks wired.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.special.load(Ordering::Acquire) == 0
    }

    /// The hot path of [`Heap::malloc`] while [`Heap::is_plain`], for sizes above 0 that are
    /// `LARGE` ([`crate::device::is_large`]) or not: 0 wherever something is out of the ordinary.
    #[inline(always)]
    pub fn serve<const LARGE: bool>(&self, size: u64, device: i32, stream: StreamHandle) -> u64 {
        let Some(device) = self.devices.get(device as usize).and_then(OnceBox::get) else {
            return 0;
        };
        let start = clock::now();
        let Some(number) = device.streams.resolve_lasting(&*self.shared.questions, stream) else {
            return 0;
        };
        let tags = lifetime::tags();
        if tags.is_routed() {
            return 0;
        }
        let request = Request::new(size, number, tags.lifetime(), start);
        let address = if LARGE {
            device.serve_large(&self.shared, request)
        } else {
            device.serve_small(&self.shared, request)
        };
        if address != 0 {
            sample_latency(self.shared.record, true, start);
            if LARGE && self.shared.sites.is_some() {
                self.note_site(device, size, address);
            }
        }
        address
    }

    /// `size` bytes on `device` in the order of `stream`, at a multiple of 512 B. Size 0 answers 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] after everything was tried; the driver's errors; a device that there
    /// is not.
    pub fn malloc(&self, size: u64, device: i64, stream: StreamHandle) -> Result<u64, Error> {
        if size == 0 {
            return Ok(0);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let shared = &self.shared;
        let found = device.named(shared, stream)?;
        let tags = lifetime::tags();
        let request = Request::new(size, found.number, tags.lifetime(), start);
        let plain = self.special.load(Ordering::Acquire) & !UNANNOUNCED == 0;
        let address = if plain && !found.captures() && !tags.is_routed() {
            device.malloc(shared, request)?
        } else {
            self.malloc_special(device, request, stream, &found, None)?
        };
        sample_latency(shared.record, true, start);
        self.served(device, size, address);
        Ok(address)
    }

    /// As [`Heap::malloc`], from the memory of the graphs that were captured into pool `id`, while
    /// there are any: what a program allocates beside its graphs and they use, which must stay
    /// where it is as theirs does. A stream that captures gets the memory of its own capture.
    ///
    /// # Errors
    /// As [`Heap::malloc`].
    pub fn malloc_for_graphs(
        &self,
        size: u64,
        device: i64,
        stream: StreamHandle,
        id: PoolId,
    ) -> Result<u64, Error> {
        if size == 0 {
            return Ok(0);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let found = device.named(&self.shared, stream)?;
        let lifetime = lifetime::tags().lifetime();
        let request = Request::new(size, found.number, lifetime, start);
        let address = self.malloc_special(device, request, stream, &found, Some(id))?;
        sample_latency(self.shared.record, true, start);
        self.served(device, size, address);
        Ok(address)
    }

    /// As [`Heap::malloc`], at `address` and nowhere else: of free memory of the stream's, in the
    /// pool that it captures for, the memory of the graphs of pool `graphs`, the pool that the
    /// thread is in, or ordinary memory, where blocks of slabs are not had. `None`:
    /// such memory is not there.
    ///
    /// # Errors
    /// A device that there is not; the driver's, which is asked whether the stream captures.
    pub fn malloc_at(
        &self,
        size: u64,
        device: i64,
        stream: StreamHandle,
        address: u64,
        graphs: Option<PoolId>,
    ) -> Result<Option<u64>, Error> {
        if size == 0 {
            return Ok(None);
        }
        let start = clock::now();
        let device = self.device(device)?;
        let shared = &self.shared;
        let found = device.named(shared, stream)?;
        let request = Request::new(size, found.number, lifetime::tags().lifetime(), start);
        let capture = device.capture_of(shared, stream, &found)?;
        let served = device.malloc_at(shared, request, address, |central| {
            if let Some(capturing) = capture {
                return Some(central.pool_for_capture(capturing, request.stream));
            }
            let of_graphs = graphs.and_then(|id| central.pool_of_graphs(id).ok());
            of_graphs.map(|(number, _)| number).or_else(|| route::pool_on(device.id))
        });
        if let Some(address) = served {
            self.noted(device, &request, address, stream);
            self.served(device, size, address);
        }
        Ok(served)
    }

    /// A block of `size` bytes begins at `address`.
    fn served(&self, device: &Device, size: u64, address: u64) {
        let is_wanted = || is_large(size) || self.special.load(Ordering::Relaxed) & ALL_SITES != 0;
        if self.shared.sites.is_some() && is_wanted() {
            self.note_site(device, size, address);
        }
    }

    /// Notes where the calling thread's request comes from, which the block at `address` has
    /// answered: nobody else knows of that block yet.
    #[cold]
    #[inline(never)]
    fn note_site(&self, device: &Device, size: u64, address: u64) {
        let site = self.shared.site(size);
        if site != SiteId::NONE {
            device.set_site(address, self.shared.table.get(address), site);
        }
    }

    #[cold]
    fn malloc_special(
        &self,
        device: &Device,
        request: Request,
        stream: StreamHandle,
        found: &Resolved<'_>,
        graphs: Option<PoolId>,
    ) -> Result<u64, Error> {
        let shared = &self.shared;
        let special = self.special.load(Ordering::Acquire);
        if self.hooks() & (HOOK_RECORD_STREAM | HOOK_CAPTURES) != HOOK_RECORD_STREAM | HOOK_CAPTURES
            && self.hooks() & ORDERED_CALLERS == 0
        {
            self.warn_of_missing_hooks();
        }
        let watched = special & WATCH_CAPTURES != 0 && request.stream != streams::ALL_STREAMS;
        let capture = if watched || found.captures() {
            device.capture_of(shared, stream, found)?
        } else {
            None
        };
        if capture.is_none() {
            self.forget_failed_captures(device);
        }
        if shared.settings.debug.sync && capture.is_none() {
            device.synchronize(shared);
        }
        let address = match capture {
            // Whatever the backing: memory that a graph uses must stay when its block is freed.
            Some(capture) => device.malloc_captured(shared, request, capture)?,
            None => match (graphs, device.supply.way(request.size), route::pool_on(device.id)) {
                (Some(id), ..) => device.malloc_for_graphs(shared, request, id)?,
                (_, Way::Driver, _) => device.malloc_direct(shared, request)?,
                (_, _, Some(pool)) => device.malloc_pooled(shared, request, pool)?,
                (_, Way::Dedicated, None) => device.malloc_dedicated(shared, request)?,
                (_, Way::Heap, None) => device.malloc(shared, request)?,
            },
        };
        if shared.settings.debug.poison
            && capture.is_none()
            && request.stream != streams::ALL_STREAMS
        {
            let result =
                shared.driver.memset(device.id, address, POISON_FRESH, round(request.size), stream);
            if let Err(error) = result {
                log::warn!("debug:poison could not fill the block at {address:#x}: {error}");
            }
        }
        self.noted(device, &request, address, stream);
        Ok(address)
    }

    /// Adds a block to the history and the trace, where they are kept.
    fn noted(&self, device: &Device, request: &Request, address: u64, stream: StreamHandle) {
        if self.special.load(Ordering::Acquire) & HISTORY != 0 {
            self.note_malloc(device.id, address, request.size, stream);
        }
        if let Some(trace) = &self.trace {
            trace.malloc(address, request.size, device.id, request.stream);
        }
    }

    #[cold]
    fn warn_of_missing_hooks(&self) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        let hooks = self.hooks();
        let missing =
            [(HOOK_RECORD_STREAM, "record_stream"), (HOOK_CAPTURES, "CUDA graph captures")];
        let missing: Vec<&str> =
            missing.into_iter().filter(|hook| hooks & hook.0 == 0).map(|hook| hook.1).collect();
        let effect = |hook: u32, text: &'static str| if hooks & hook == 0 { text } else { "" };
        ONCE.call_once(|| {
            log::warn!(
                "not wired: {}.{}{} Set the hooks and call gruyere_announce_hooks(3) to have all \
                 of it.",
                missing.join(", "),
                effect(
                    HOOK_RECORD_STREAM,
                    " Memory stays with its stream, and Tensor.record_stream has no effect."
                ),
                effect(HOOK_CAPTURES, " Memory of CUDA graphs is never reused.")
            );
        });
    }
}

/// One call in 64 is timed, chosen by the clock itself.
#[inline]
pub(crate) fn sample_latency(record: &Record, malloc: bool, start: u64) {
    if start >> 6 & 63 == 0 {
        note_latency(record, malloc, start);
    }
}

#[cold]
#[inline(never)]
fn note_latency(record: &Record, malloc: bool, start: u64) {
    record.latency(malloc, clock::now().wrapping_sub(start));
}
