//! Programs served by another allocator, which the heap only watches (`--observe`): it enters each
//! block in the books and in the record, and allocates no memory.

use crate::callers::watched_blocks::{DEVICES, POOL, SAMPLE_EVERY, Seen, Watched};
use crate::central::Central;
use crate::device::Device;
use crate::driver::absent::AbsentDriver;
use crate::driver::{DriverError, StreamHandle};
use crate::heap::Heap;
use crate::order::streams;
use crate::report::cause::Report;
use crate::settings::{Backing, Settings};
use crate::shared::Shared;
use crate::small::size_class::{round, round_up};
use crate::sync::lock;
use gruyere_record::{Block, BlockTag, DeviceGauge, bucket_of, clock};
use std::sync::Arc;

impl Device {
    #[inline(always)]
    pub(crate) fn saw_malloc(&self, shared: &Shared, address: u64, requested: u64, stream: u32) {
        // Beyond all memory that exists; not counting it loses nothing.
        if round_up(requested, crate::small::size_class::ALIGNMENT).is_none() {
            return;
        }
        let (block, time) = (self.describe(address, requested, stream), clock::now());
        let central = &mut *lock(&self.central);
        let slot = central.writers[POOL].place();
        central.writers[POOL].malloc(slot, block, || shared.step(), time);
        let known = central.watched.blocks.insert(address, Seen { size: requested, stream, slot });
        central.watched.held += block.size;
        if let Some(known) = known {
            self.forget(central, address, known, time);
        }
        central.publish_watched();
    }

    /// The blocks seen and not freed yet.
    pub(crate) fn seen(&self) -> Vec<u64> {
        lock(&self.central).watched.blocks.addresses().collect()
    }

    #[inline(always)]
    pub(crate) fn saw_free(&self, address: u64) -> bool {
        let time = clock::now();
        let central = &mut *lock(&self.central);
        let Some(known) = central.watched.blocks.remove(address) else { return false };
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writers[POOL].free(known.slot, block, time);
        central.publish_watched();
        true
    }

    /// Takes a block off the record that was freed without our seeing it.
    #[cold]
    #[inline(never)]
    fn forget(&self, central: &mut Central, address: u64, known: Seen, time: u64) {
        let block = self.describe(address, known.size, known.stream);
        central.watched.held -= block.size;
        central.writers[POOL].free(known.slot, block, time);
    }

    /// The record's description of a block.
    #[inline(always)]
    fn describe(&self, address: u64, requested: u64, stream: u32) -> Block {
        let size = round(requested);
        let tag = BlockTag::new(self.id as u8, 0, 0, stream);
        Block { tag, address, size, requested, bucket: bucket_of(size) }
    }
}

impl Heap {
    /// A heap that keeps the books of [`Heap::saw_malloc`] and [`Heap::saw_free`] and allocates
    /// nothing.
    ///
    /// # Errors
    /// None known; the signature mirrors [`Heap::new`].
    pub fn watcher(settings: Settings) -> Result<Self, DriverError> {
        let settings = Settings { backing: Backing::Passthrough, auto_trim: false, ..settings };
        Self::new(Arc::new(AbsentDriver { devices: DEVICES }), settings)
    }

    /// Notes `size` bytes that another allocator gave at `address` of `device`, in the order of
    /// `stream` ([`StreamHandle::ALL_STREAMS`]: of none).
    #[inline(always)]
    pub fn saw_malloc(&self, device: i64, address: u64, size: u64, stream: StreamHandle) {
        if let Ok(device) = self.device(device)
            && address != 0
        {
            let stream = if stream == StreamHandle::ALL_STREAMS {
                streams::ALL_STREAMS
            } else if let Some(number) =
                device.streams.resolve_lasting(&*self.shared.driver, stream)
            {
                number
            } else {
                let found = device.streams.resolve(&*self.shared.driver, stream);
                found.map_or(streams::ALL_STREAMS, |found| found.number)
            };
            device.saw_malloc(&self.shared, address, size, stream);
            if let Some(trace) = &self.trace {
                trace.malloc(address, size, device.id, stream);
            }
        }
    }

    /// Notes that the other allocator refused `size` bytes on `device`, in the order of `stream`,
    /// for want of memory.
    #[cold]
    pub fn saw_refusal(&self, device: i64, size: u64, stream: StreamHandle) {
        if let Ok(device) = self.device(device) {
            let number = device.streams.resolve_lasting(&*self.shared.driver, stream);
            let mut report = Report {
                device: device.id,
                asked: size,
                stream: (number.unwrap_or(streams::ALL_STREAMS), stream.0 as u64),
                ..Report::default()
            };
            device.count_out_of_memory(&self.shared, &mut report);
        }
    }

    /// Notes that the other allocator is about to take back the block at `address`. False if the
    /// block is unknown.
    #[inline(always)]
    pub fn saw_free(&self, address: u64, _stream: StreamHandle) -> bool {
        let known = self.devices().any(|device| device.saw_free(address));
        if known && let Some(trace) = &self.trace {
            trace.free(address);
        }
        known
    }
}

impl Central {
    #[inline(always)]
    pub(crate) fn publish_watched(&mut self) {
        let Watched { held, changes, .. } = &mut self.watched;
        *changes += 1;
        let (held, is_due) = (*held, *changes % SAMPLE_EVERY == 1);
        (self.backing.held, self.backing.reserved) = (held, held);
        if held > self.peak_reserved {
            self.peak_reserved = held;
            self.gauges.set(&[(DeviceGauge::Reserved, held), (DeviceGauge::ReservedPeak, held)]);
        } else {
            self.gauges.set(&[(DeviceGauge::Reserved, held)]);
        }
        if is_due {
            self.sample_watched();
        }
    }

    #[cold]
    #[inline(never)]
    fn sample_watched(&mut self) {
        let held = self.watched.held;
        self.usage.hold(held, self.watched.blocks.len() as u64);
        self.gauges.sample(held);
    }
}
