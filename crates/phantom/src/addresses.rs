//! Sources of simulated addresses.

use crate::ranges::FreeRanges;

/// A source of address space. The simulator keeps the 47-bit account; a provider only picks
/// numbers, or maps real host memory behind them, as the ABI face does.
pub trait AddressProvider: Send {
    /// `bytes` of fresh address space, aligned to `align` (a power of two); `None`: exhausted.
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64>;
    /// Returns a whole reservation.
    fn release(&mut self, address: u64, bytes: u64);
    /// Memory has left a part of a reservation: its contents are lost.
    fn vacated(&mut self, _address: u64, _bytes: u64) {}
}

/// Plain numbers, the same on every run: released space is reused, best fit, before fresh space is
/// taken.
#[derive(Debug)]
pub struct CountingAddresses {
    next: u64,
    free: FreeRanges,
}

/// Start of [`CountingAddresses`]: above 4 GiB, so that a truncated address shows.
const FIRST: u64 = 0x7_0000_0000;
/// One past the last address: 47 bits, as in the driver.
const LAST: u64 = 1 << 47;

impl Default for CountingAddresses {
    fn default() -> Self {
        Self { next: FIRST, free: FreeRanges::default() }
    }
}

impl AddressProvider for CountingAddresses {
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if let Some(fit) = self.free.best_fit(bytes, align) {
            self.free.cut(fit, bytes);
            return Some(fit.start);
        }
        let start = self.next.checked_next_multiple_of(align)?;
        let end = start.checked_add(bytes).filter(|&end| end <= LAST)?;
        if start > self.next {
            self.free.insert(self.next, start - self.next, 0);
        }
        self.next = end;
        Some(start)
    }

    fn release(&mut self, address: u64, bytes: u64) {
        self.free.insert(address, bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_space_is_reused_before_fresh_space() {
        let mut addresses = CountingAddresses::default();
        let a = addresses.reserve(4 << 20, 2 << 20).unwrap();
        let b = addresses.reserve(4 << 20, 2 << 20).unwrap();
        assert_ne!(a, b);
        addresses.release(a, 4 << 20);
        assert_eq!(addresses.reserve(2 << 20, 2 << 20), Some(a));
        assert_eq!(addresses.reserve(2 << 20, 2 << 20), Some(a + (2 << 20)));
    }
}
