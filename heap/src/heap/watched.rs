//! Programs that are only watched.

use super::Heap;
use crate::driver::absent::AbsentDriver;
use crate::driver::{DriverError, StreamHandle};
use crate::order::streams;
use crate::settings::{Backing, Settings};
use crate::watcher::DEVICES;
use std::sync::Arc;

impl Heap {
    /// A heap that keeps books of what [`Heap::saw_malloc`] and [`Heap::saw_free`] tell it, and
    /// allocates nothing.
    ///
    /// # Errors
    /// None that is known of; the signature is [`Heap::new`]'s.
    pub fn watcher(settings: Settings) -> Result<Self, DriverError> {
        let settings = Settings { backing: Backing::Passthrough, auto_trim: false, ..settings };
        Self::new(Arc::new(AbsentDriver { devices: DEVICES }), settings)
    }

    /// Another allocator gave `size` bytes at `address` of `device`, in the order of `stream`
    /// ([`StreamHandle::ALL_STREAMS`]: of none).
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

    /// The other allocator is about to take the block at `address` back. False: it is none that was
    /// seen.
    #[inline(always)]
    pub fn saw_free(&self, address: u64, _stream: StreamHandle) -> bool {
        let known = self.devices().any(|device| device.saw_free(address));
        if known && let Some(trace) = &self.trace {
            trace.free(address);
        }
        known
    }
}
