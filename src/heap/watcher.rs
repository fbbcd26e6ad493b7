//! A heap that only keeps books: another allocator serves the program, and this one is told of each of its blocks.
//!
//! What is held is what is live: how the other allocator packs its blocks on pages is its own affair, and the driver is never asked
//! ([`AbsentDriver`]). Blocks are on the record as a managing heap's are, so everything that reads a record shows them.
#![deny(unsafe_code)]

use super::device::Device;
use super::size_class::{SMALL_MAX, round_up};
use super::{Heap, Shared, lane, lock, streams};
use crate::config::{Backing, Config};
use crate::driver::absent::AbsentDriver;
use crate::driver::{DriverError, StreamHandle};
use crate::record::{Block, BlockSlot, BlockTag, DeviceGauge, bucket_of, clock};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Devices that a watched program may use: no node has more.
const DEVICES: u32 = 16;

/// The record's pools of small and of large blocks.
const POOLS: [usize; 2] = [0, 1];

/// How often (in blocks that came or went) the timeline is brought up to now.
const SAMPLE_EVERY: u64 = 64;

/// Addresses are multiples of 512, and far from random; a multiplication by an odd constant (2^64 over the golden ratio; Knuth, The Art of Computer
/// Programming 3, 6.4) spreads them over the high bits, from which the low ones are taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, address: u64) {
        self.0 = (self.0 ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

/// A block of the program's.
#[derive(Clone, Copy, Debug)]
struct Seen {
    size: u64,
    stream: u32,
    slot: BlockSlot,
}

/// The blocks of a device.
#[derive(Debug, Default)]
pub struct Watched {
    blocks: HashMap<u64, Seen, BuildHasherDefault<AddressHasher>>,
    held: u64,
    peak: u64,
    changes: u64,
}

impl Heap {
    /// A heap that keeps books of what [`Heap::saw_malloc`] and [`Heap::saw_free`] tell it, and allocates nothing.
    ///
    /// # Errors
    /// None that is known of; the signature is [`Heap::new`]'s.
    pub fn watcher(config: Config) -> Result<Self, DriverError> {
        let config = Config { backing: Backing::Passthrough, auto_trim: false, ..config };
        Self::new(Arc::new(AbsentDriver { devices: DEVICES }), config)
    }

    /// Another allocator gave `size` bytes at `address` of `device`, in the order of `stream` ([`StreamHandle::EVERY`]: of none).
    pub fn saw_malloc(&self, device: i64, address: u64, size: u64, stream: StreamHandle) {
        if let Ok(device) = self.device(device)
            && address != 0
        {
            let stream = device.streams.resolve(&*self.shared.driver, stream).unwrap_or(streams::EVERY);
            device.saw_malloc(&self.shared, address, size, stream);
            if let Some(trace) = &self.trace {
                trace.malloc(address, size, device.id, stream);
            }
        }
    }

    /// The other allocator is about to take the block at `address` back. False: it is none that was seen.
    pub fn saw_free(&self, address: u64, _stream: StreamHandle) -> bool {
        let known = self.devices().any(|device| device.saw_free(address));
        if known && let Some(trace) = &self.trace {
            trace.free(address);
        }
        known
    }
}

impl Device {
    fn saw_malloc(&self, shared: &Shared, address: u64, requested: u64, stream: u32) {
        // A block that is there already was freed in a way that we do not see.
        if lock(&self.watched).blocks.contains_key(&address) {
            self.saw_free(address);
        }
        // Beyond all memory there is; nothing is lost by not counting it.
        if round_up(requested, super::size_class::ALIGNMENT).is_none() {
            return;
        }
        let (size, time) = (lane::round(requested), clock::now());
        let tag = BlockTag::new(self.id as u8, 0, 0, stream);
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        let step = || shared.step();
        let slot = if requested <= SMALL_MAX {
            let cell = &mut *self.lane(stream);
            let slot = cell.writer.place();
            cell.writer.malloc(POOLS[0], slot, block, step, time);
            slot
        } else {
            let central = &mut *lock(&self.central);
            let slot = central.writer.place();
            central.writer.malloc(POOLS[1], slot, block, step, time);
            slot
        };
        let mut watched = lock(&self.watched);
        watched.blocks.insert(address, Seen { size: requested, stream, slot });
        watched.held += size;
        self.publish_watched(&mut watched);
    }

    /// The blocks that were seen and are not gone.
    pub(super) fn seen(&self) -> Vec<u64> {
        lock(&self.watched).blocks.keys().copied().collect()
    }

    fn saw_free(&self, address: u64) -> bool {
        let (requested, stream, slot) = {
            let mut watched = lock(&self.watched);
            let Some(Seen { size, stream, slot }) = watched.blocks.remove(&address) else { return false };
            watched.held -= lane::round(size);
            self.publish_watched(&mut watched);
            (size, stream, slot)
        };
        let (size, time) = (lane::round(requested), clock::now());
        let tag = BlockTag::new(self.id as u8, 0, 0, stream);
        let block = Block { tag, address, size, requested, bucket: bucket_of(size) };
        if requested <= SMALL_MAX {
            self.lane(stream).writer.free(POOLS[0], slot, block, time);
        } else {
            lock(&self.central).writer.free(POOLS[1], slot, block, time);
        }
        true
    }

    fn publish_watched(&self, watched: &mut Watched) {
        watched.changes += 1;
        watched.peak = watched.peak.max(watched.held);
        let is_due = watched.changes % SAMPLE_EVERY == 1;
        let central = &mut *lock(&self.central);
        (central.backing.held, central.backing.reserved) = (watched.held, watched.held);
        central.peak_reserved = watched.peak;
        central
            .gauges
            .set(&[(DeviceGauge::Reserved, watched.held), (DeviceGauge::ReservedPeak, watched.peak)]);
        if is_due {
            central.tally.hold(watched.held, watched.blocks.len() as u64);
            central.gauges.sample(watched.held);
        }
    }
}
