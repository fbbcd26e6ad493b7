//! The waits between streams that the program adds itself: `cudaStreamWaitEvent` after
//! `cudaEventRecord`, torch's `Stream.wait_stream`, `wait_event`.
//!
//! Work that a stream gets after such a wait comes after all that the other stream had before the
//! event. So what that stream had freed by its last malloc before it is ordered before the waiting
//! stream's later work, as are its uses of other streams' blocks, as with a wait that the allocator
//! adds ([`crate::order::waits`]), though no wait is added and none can close a cycle. Whoever sees
//! the program's calls tells the heap in two steps:
//!
//! 1. Before the event is recorded, [`Heap::mark_work`] closes the open epoch of its stream. A free
//!    of that epoch comes after its block's last use was enqueued and before the record, so the
//!    event is behind that use.
//! 2. After the wait is added, [`Heap::stream_waits`] notes the order. A request that sees it comes
//!    after the wait, and so does the work on what it gets.
//!
//! The stream is then also behind what the marked one had waited for by its mark
//! ([`crate::order::waits::Order::add_of_program`]).
//!
//! Where the heap adds waits itself, a mark is a clock, and no epoch ends: the heap learns how far
//! behind the waiting stream is, and no order.
//!
//! A stream that captures does not get its work in this order: a mark or a wait during a capture
//! tells nothing, and is ignored.

use crate::driver::StreamHandle;
use crate::heap::Heap;
use crate::order::pending::Work;
use crate::order::streams::{MAX_STREAMS, NUMBERS};
use crate::shared::MAX_DEVICES;

const STREAM_BITS: u32 = NUMBERS.ilog2();
const DEVICE_BITS: u32 = 8;
const BEHIND_BITS: u32 = 4;
const EPOCH_BITS: u32 = u64::BITS - STREAM_BITS - DEVICE_BITS - BEHIND_BITS;
/// In place of the epochs behind: the mark is a clock.
const CLOCK: u64 = (1 << BEHIND_BITS) - 1;
const UNRIPE: u64 = CLOCK - 1;
const _: () = assert!(NUMBERS.is_power_of_two() && MAX_STREAMS < NUMBERS as usize);
const _: () = assert!(MAX_DEVICES <= 1 << DEVICE_BITS);

/// The work that a stream had at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    device: u32,
    stream: u32,
    moment: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// The end of an epoch.
    Epoch {
        epoch: u64,
        /// Epochs before it from the last one whose freed memory is ripe; [`UNRIPE`]: that many or
        /// more.
        behind: u64,
    },
    /// The host's clock: for how far behind a stream is, and no order.
    Clock(u64),
}

impl Mark {
    /// The mark as one number, never 0. `None`: its epoch or clock has too many digits.
    #[must_use]
    pub fn to_bits(self) -> Option<u64> {
        let Self { device, stream, moment } = self;
        let (behind, at) = match moment {
            Moment::Epoch { epoch, behind } => (behind, epoch),
            Moment::Clock(clock) => (CLOCK, clock),
        };
        let place = u64::from(device) << STREAM_BITS | u64::from(stream);
        let place = place << BEHIND_BITS | behind;
        (at >> EPOCH_BITS == 0).then_some(place << EPOCH_BITS | at)
    }

    /// The inverse of [`Mark::to_bits`]; `None` for what is no mark: 0, and an epoch 0.
    #[must_use]
    pub fn from_bits(bits: u64) -> Option<Self> {
        let (place, at) = (bits >> EPOCH_BITS, bits & ((1 << EPOCH_BITS) - 1));
        let (place, behind) = (place >> BEHIND_BITS, place & CLOCK);
        let (device, stream) = (place >> STREAM_BITS, place & u64::from(NUMBERS - 1));
        let moment = match behind {
            CLOCK => Moment::Clock(at),
            _ if at == 0 => return None,
            _ => Moment::Epoch { epoch: at, behind },
        };
        Some(Self { device: device as u32, stream: stream as u32, moment })
    }
}

impl Heap {
    /// The work that `stream` of `device` has so far: call it just before the program records an
    /// event on the stream. `None`: the stream captures, it may end without notice, nothing was
    /// allocated on the device, or memory does not pass between streams.
    pub fn mark_work(&self, device: i64, stream: StreamHandle) -> Option<Mark> {
        if !self.shared.shares() {
            return None;
        }
        let device = self.device_in_use(device).ok()??;
        let number = device.streams.resolve_announced(&*self.shared.questions, stream)?;
        // Where the heap adds the waits that it needs, the moment is enough.
        let moment = if self.shared.waits_to_hold_less() {
            Moment::Clock(device.streams.host_clock())
        } else {
            let Work { epoch, ripe } = device.streams.close_work(number);
            Moment::Epoch { epoch, behind: (epoch - ripe).min(UNRIPE) }
        };
        Some(Mark { device: device.id, stream: number, moment })
    }

    /// The program has made `stream` of `device` wait for an event that was recorded after `mark`
    /// was made, on the same stream. Ignored are a wait for a stream of another device, and one
    /// noted while another thread has the device's lock: it may hold it for long, and the program's
    /// next work must not stand behind that.
    pub fn stream_waits(&self, device: i64, stream: StreamHandle, mark: Mark) {
        let Ok(Some(device)) = self.device_in_use(device) else { return };
        // A number is forgotten under this lock, once its stream has ended.
        let Some(mut central) = device.central.try_lock() else { return };
        let waiter = device.streams.resolve_announced(&*self.shared.questions, stream);
        if let Some(waiter) = waiter.filter(|&waiter| waiter != mark.stream)
            && device.id == mark.device
        {
            match mark.moment {
                Moment::Clock(clock) => central.order.note_wait(waiter, mark.stream, clock),
                Moment::Epoch { epoch, behind } => {
                    let ripe = if behind == UNRIPE { 0 } else { epoch - behind };
                    let order = (mark.stream, Work { epoch, ripe });
                    central.order.add_of_program(&device.streams, waiter, order);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_a_number_other_than_0_and_back() {
        let longest = (1 << EPOCH_BITS) - 1;
        let epochs = [1, 77, longest]
            .into_iter()
            .flat_map(|epoch| [0, 3, UNRIPE].map(|behind| Moment::Epoch { epoch, behind }));
        let clocks = [0, 1, longest].map(Moment::Clock);
        for moment in epochs.chain(clocks) {
            for device in [0, MAX_DEVICES - 1] {
                for stream in [0, 1, MAX_STREAMS as u32] {
                    let mark = Mark { device, stream, moment };
                    let bits = mark.to_bits().unwrap();
                    assert!(bits != 0 && Mark::from_bits(bits) == Some(mark));
                }
            }
        }
        assert_eq!(Mark::from_bits(0), None);
        for moment in
            [Moment::Clock(1 << EPOCH_BITS), Moment::Epoch { epoch: 1 << EPOCH_BITS, behind: 0 }]
        {
            assert_eq!(Mark { device: 0, stream: 0, moment }.to_bits(), None);
        }
    }
}
