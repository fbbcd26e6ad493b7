//! A lower bound of held memory on a device that lags, for every allocator that adds no waits and
//! does not know those of the program.
//!
//! Such an allocator may give freed memory to a stream once all its other users have done their
//! work on it. The bound has no sizes, pages or addresses: any freed bytes serve any request. It
//! takes bytes that only the requesting stream may use yet before those that every stream may use,
//! and of the former those freed last. No other choice holds less: bytes freed later on the same
//! stream may be used by no stream that may not use the earlier ones too.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::allocator::{AllocError, Allocator};
use crate::bench::{BenchError, ample};
use crate::clock::Clock;
use crate::engine::{Blind, Perfect, replay};
use crate::stage::{PhantomStage, Setup};
use crate::trace::{Trace, rounded};
use gruyere::driver::{DeviceId, DevicePtr, Driver, EventHandle, StreamHandle};
use std::collections::HashMap;
use std::sync::Arc;

/// The least that such an allocator holds at the peak of `trace` on `clock`, over peak live: the
/// bound of [`crate::bench::Lag::hold_ratio`].
///
/// # Errors
/// If a replay breaks off.
pub fn held_floor(trace: &Trace, clock: Clock) -> Result<f64, BenchError> {
    let mut stage = PhantomStage::new(trace, Setup::at(clock, ample(trace)));
    let mut least = Least::new(stage.driver(), trace.devices.into());
    replay(trace, &mut stage, &mut least, &mut Blind)?;
    let held: u64 = least.devices.iter().map(|device| device.held).sum();
    Ok(held as f64 / trace.peak_live.max(1) as f64)
}

/// Freed bytes, and the streams that may still use them with the event behind each one's last use.
struct Freed {
    bytes: u64,
    users: Vec<(StreamHandle, EventHandle)>,
}

#[derive(Default)]
struct Device {
    /// Bytes taken from the driver: none go back.
    held: u64,
    /// Freed bytes that every stream may use.
    idle: u64,
    /// All other freed bytes, in the order of their frees.
    freed: Vec<Freed>,
}

impl Device {
    /// Takes `bytes` for `stream`.
    fn take(&mut self, bytes: u64, stream: StreamHandle) {
        let mut needed = bytes;
        let only_its = |freed: &&mut Freed| freed.users.iter().all(|user| user.0 == stream);
        for freed in self.freed.iter_mut().rev().filter(only_its) {
            let taken = needed.min(freed.bytes);
            freed.bytes -= taken;
            needed -= taken;
        }
        self.freed.retain(|freed| freed.bytes > 0);
        let taken = needed.min(self.idle);
        self.idle -= taken;
        self.held += needed - taken;
    }
}

struct Least {
    driver: Arc<dyn Driver>,
    devices: Vec<Device>,
    /// The streams of each live block.
    users: HashMap<DevicePtr, Vec<StreamHandle>>,
    addresses: Perfect,
}

impl Least {
    fn new(driver: Arc<dyn Driver>, devices: usize) -> Self {
        Self {
            driver,
            devices: (0..devices).map(|_| Device::default()).collect(),
            users: HashMap::new(),
            addresses: Perfect::default(),
        }
    }
}

impl Allocator for Least {
    fn name(&self) -> &str {
        "least"
    }

    fn malloc(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        let place = &mut self.devices[device as usize];
        for freed in &mut place.freed {
            let mut busy = Vec::with_capacity(freed.users.len());
            for &(user, event) in &freed.users {
                if self.driver.event_query(device, event)? {
                    self.driver.event_destroy(device, event)?;
                } else {
                    busy.push((user, event));
                }
            }
            freed.users = busy;
        }
        place.idle += place
            .freed
            .extract_if(.., |freed| freed.users.is_empty())
            .map(|freed| freed.bytes)
            .sum::<u64>();
        place.take(rounded(size), stream);
        let address = self.addresses.malloc(size, device, stream)?;
        self.users.insert(address, vec![stream]);
        Ok(address)
    }

    fn free(
        &mut self,
        address: DevicePtr,
        size: u64,
        device: DeviceId,
        _: StreamHandle,
    ) -> Result<(), AllocError> {
        let users = self.users.remove(&address).ok_or(AllocError::UnknownAddress(address))?;
        let behind = |user| {
            let event = self.driver.event_create(device)?;
            self.driver.event_record(device, event, user)?;
            Ok((user, event))
        };
        let users = users.into_iter().map(behind).collect::<Result<_, AllocError>>()?;
        let place = &mut self.devices[device as usize];
        place.freed.push(Freed { bytes: rounded(size), users });
        Ok(())
    }

    fn record_stream(
        &mut self,
        address: DevicePtr,
        stream: StreamHandle,
    ) -> Result<(), AllocError> {
        let users = self.users.get_mut(&address).ok_or(AllocError::UnknownAddress(address))?;
        if !users.contains(&stream) {
            users.push(stream);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floor(text: &str) -> f64 {
        let trace = Trace::read("tiny", text.as_bytes()).expect("a trace");
        held_floor(&trace, Clock::USUAL).expect("a floor")
    }

    #[test]
    fn freed_bytes_serve_another_stream_once_the_work_on_them_is_done() {
        // 100 kernels of 20 us on stream 1, then a block of the same size on stream 2.
        let busy = "a 1 1048576 0 1\nk 1 100\nf 1\n";
        assert_eq!(floor(&format!("{busy}a 2 1048576 0 2\nk 2 1\nf 2\n")), 2.0);
        assert_eq!(floor(&format!("{busy}h d\na 2 1048576 0 2\nk 2 1\nf 2\n")), 1.0);
        // The same stream has them at once.
        assert_eq!(floor(&format!("{busy}a 2 1048576 0 1\nk 1 1\nf 2\n")), 1.0);
    }

    #[test]
    fn bytes_that_another_stream_used_wait_for_it() {
        let lent = "a 1 1048576 0 1\nk 1 1\nr 1 2\nk 2 100\nf 1\n";
        assert_eq!(floor(&format!("{lent}a 2 1048576 0 1\nk 1 1\nf 2\n")), 2.0);
    }

    #[test]
    fn a_stream_takes_what_others_may_not_use_before_what_they_may() {
        // Stream 1 has an idle block and a busy one; then streams 1 and 2 want one each.
        let text = "a 1 1048576 0 1\na 2 1048576 0 1\nk 1 1\nf 1\nh d\nk 1 100\nf 2\n\
                    a 3 1048576 0 1\na 4 1048576 0 2\nf 3\nf 4\n";
        assert_eq!(floor(text), 1.0);
    }
}
