//! A device's blocks inside captures: allocation, free, and the end of a pool.
#![deny(unsafe_code)]

use crate::driver::{CaptureStatus, ErrorKind, StreamHandle};
use crate::heap::arena::RunId;
use crate::heap::capture::{CapturePool, Capturing, Found};
use crate::heap::central;
use crate::heap::central::Central;
use crate::heap::device::Device;
use crate::heap::error::Error;
use crate::heap::lane::{FreeOutcome, LANES};
use crate::heap::page_table::Owner;
use crate::heap::request::{Growth, Request, Want};
use crate::heap::shared::Shared;
use crate::heap::size_class::round;
use crate::heap::size_class::{ALIGNMENT, PAGE, SIZE_CLASSES, SMALL_MAX, class_of};
use crate::heap::slab::Slab;
use crate::heap::streams::{DEFAULT_STREAM, Resolved};
use crate::heap::sync::lock;
use crate::record::BlockTag;

impl Device {
    /// What the stream of `handle` captures, if anything; it is asked where it was not before.
    ///
    /// # Errors
    /// The driver's.
    pub fn capture_of(
        &self,
        shared: &Shared,
        handle: StreamHandle,
        found: &Resolved<'_>,
    ) -> Result<Option<Capturing>, Error> {
        let stream = found.number;
        match found.status.unwrap_or_else(|| shared.driver.capture_status(self.id, handle)) {
            Ok(CaptureStatus::Active(id)) => Ok(Some(Capturing::Id(id))),
            // It can only be ended: its work never runs, but its blocks must not be taken for ordinary ones.
            Ok(CaptureStatus::Invalidated) => Ok(Some(Capturing::Invalidated)),
            Ok(CaptureStatus::None) => Ok(None),
            // The legacy stream cannot be asked while another captures: it does not capture itself.
            Err(error) if error.kind == ErrorKind::Capturing && stream == DEFAULT_STREAM => Ok(None),
            Err(error) if error.kind == ErrorKind::Capturing => Ok(Some(Capturing::Unclear)),
            Err(error) if error.kind == ErrorKind::NotSupported => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// As [`Device::malloc`] for a stream that captures: from the private memory of the capture's pool.
    ///
    /// # Errors
    /// Out of memory.
    pub fn malloc_captured(
        &self,
        shared: &Shared,
        request: Request,
        capturing: Capturing,
    ) -> Result<u64, Error> {
        if central::is_absurd(request.size) {
            return Err(self.out_of_memory(shared, request.size, request.stream));
        }
        for last in [false, true] {
            {
                let central = &mut *lock(&self.central);
                let number = pool_of(central, capturing, request.stream);
                if let Some(address) = self.captured_block(shared, central, number, &request) {
                    return Ok(address);
                }
            }
            if !last {
                // Nothing may be waited for, but what the streams are known to be past can be given back.
                self.return_empty_slabs(shared);
                self.take_in(shared, &mut lock(&self.central));
            }
        }
        Err(self.refusal(shared, &request))
    }

    fn captured_block(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        request: &Request,
    ) -> Option<u64> {
        let tag = u8::try_from(number + 1).unwrap_or(u8::MAX);
        let step = shared.step();
        let address = if request.size > SMALL_MAX {
            let bytes = round(request.size);
            let run = self.captured_run(shared, central, number, (bytes, ALIGNMENT), request)?;
            central.publish(&shared.table, run, request, step, tag)
        } else {
            let first =
                central.captures.get_mut(number)?.lane.allocate(&mut central.writer, *request, || step);
            match first {
                0 => {
                    self.captured_slab(shared, central, number, request)?;
                    central.captures.get_mut(number)?.lane.allocate(&mut central.writer, *request, || step)
                }
                address => address,
            }
        };
        if address == 0 {
            return None;
        }
        let pool = central.captures.get_mut(number)?;
        pool.live += 1;
        pool.version += 1;
        Some(address)
    }

    fn captured_slab(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        request: &Request,
    ) -> Option<()> {
        let class = class_of(request.size) as u8;
        let size_class = &SIZE_CLASSES[class as usize];
        let bytes = size_class.slab_bytes();
        let run = self.captured_run(shared, central, number, (bytes, PAGE), request)?;
        let facts = central.arenas.run_mut(run)?;
        facts.is_slab = true;
        let base = facts.address;
        central.tally.slab_taken(bytes);
        let tag = u8::try_from(number + 1).unwrap_or(u8::MAX);
        let whose = BlockTag::new(self.id as u8, request.lifetime as u8, tag, request.stream);
        let mut slab = Slab::new(base, class, whose, run);
        let slot = u64::from(size_class.slot);
        let segment = central::slab_segment(self.id, base, bytes, slot, request.stream, slab.lifetime, tag);
        slab.segment = shared.record.segment_insert(&segment);
        let id = central.captures.get_mut(number)?.lane.add_slab(slab);
        let owner = Owner::Slab { device: self.id, lane: LANES as u32 + number, slab: id };
        shared.table.set_range(base, bytes, owner);
        Some(())
    }

    /// The pool's own memory, else growth: no event may be asked about, and nobody else's memory may be taken.
    fn captured_run(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        (bytes, align): (u64, u64),
        request: &Request,
    ) -> Option<RunId> {
        let space = central.captures.get_mut(number)?.space;
        let want = Want { space, bytes, align, stream: request.stream };
        if let Some(run) = want.fit(&mut central.arenas) {
            return Some(run);
        }
        if self.empty_pool_slabs(shared, central, number)
            && let Some(run) = want.fit(&mut central.arenas)
        {
            return Some(run);
        }
        let capture = u8::try_from(number + 1).unwrap_or(u8::MAX);
        let growth = Growth { capture, ..Growth::of(shared, &self.streams, request.lifetime) };
        if central.extend(&growth, want, true).is_err() {
            if let Some(_giving) = self.giving(shared) {
                central.shrink_all(&*shared.driver, shared.record, &self.streams);
                central.backing.trim(&*shared.driver);
                central.publish_reserved();
            }
            if let Err(error) = central.extend(&growth, want, false) {
                central.failure = (!error.is_out_of_memory()).then_some(error);
                return None;
            }
        }
        want.fit_or_join(&mut central.arenas)
    }

    /// Gives the empty slabs of a capture pool back to its space, each to its stream. True if there was one.
    fn empty_pool_slabs(&self, shared: &Shared, central: &mut Central, number: u32) -> bool {
        let Some(pool) = central.captures.get_mut(number) else { return false };
        pool.lane.settle(&mut central.writer, &self.streams);
        let empty = pool.lane.empty_slabs();
        let slabs: Vec<Slab> = empty.iter().filter_map(|&id| pool.lane.remove_slab(id)).collect();
        for slab in &slabs {
            self.unpublish(shared, Some(slab));
            central.release_slab(slab.run, slab.stream, slab.epoch);
        }
        !slabs.is_empty()
    }

    /// Frees the small block at `address` of capture pool `number`. `None`: no block starts there.
    pub(in crate::heap) fn free_captured(
        &self,
        number: u32,
        slab: u32,
        address: u64,
        start: u64,
    ) -> Option<()> {
        let central = &mut *lock(&self.central);
        let pool = central.captures.get_mut(number)?;
        let outcome = if pool.frozen {
            pool.lane.freeze(&mut central.writer, slab, address, start)
        } else {
            pool.lane.free(&mut central.writer, slab, address, start, &self.streams)
        };
        match outcome {
            FreeOutcome::Freed | FreeOutcome::Waits | FreeOutcome::Surplus(_) => {
                pool.live -= 1;
                Some(())
            }
            FreeOutcome::Unknown => None,
        }
    }

    /// Gives the memory of a capture pool back that was over before the device was synchronised, if nobody has used it since.
    /// Nothing may be capturing on the device.
    pub(in crate::heap) fn retire_pool(
        &self,
        shared: &Shared,
        central: &mut Central,
        number: u32,
        version: u64,
    ) {
        let is_unchanged = central.captures.get_mut(number).is_some_and(|pool| pool.version == version);
        if !is_unchanged || !central.captures.is_over(number) {
            return;
        }
        self.empty_pool_slabs(shared, central, number);
        let Some(space) = central.captures.get_mut(number).map(|pool| pool.space) else { return };
        central.arenas.give_to_everybody(space, &|_| u64::MAX);
        for region in central.arenas.empty_regions(space, &|_| u64::MAX) {
            central.shrink(&*shared.driver, shared.record, region);
        }
        central.loosen(&*shared.driver, &self.streams, &[space], &|_| u64::MAX, u64::MAX);
        central.free_addresses(&*shared.driver, space);
        central.backing.refresh_pages();
        // A block that waits for another stream, or a span that the driver would not take: next time.
        if central.arenas.is_empty(space) {
            central.captures.pools[number as usize] = None;
            central.arenas.remove_space(space);
        }
    }
}

/// The number of the pool for a stream that captures, which may be a new one.
fn pool_of(central: &mut Central, capturing: Capturing, stream: u32) -> u32 {
    let (ties, frozen) = match central.captures.matched(capturing, stream) {
        Found::Pool(number) => return number,
        Found::Tied(ties) => (ties, false),
        Found::Frozen => (Vec::new(), true),
    };
    let pool = CapturePool { ties, frozen, ..CapturePool::new(None, central.arenas.add_space(true)) };
    let number = central.captures.add(pool);
    central.captures.adopt(number, capturing, stream);
    number
}
