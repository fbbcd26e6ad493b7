//! Values that the host reads from device memory (`PHANTOM_VALUES`).
//!
//! No kernel runs here, so a kernel's results have to be made up. Without the setting the host
//! reads the bytes at the address, and copies above the limit leave the host's memory as it was.
//! With it every copy to the host writes all of its destination: data of an earlier copy or fill
//! (at most `PHANTOM_COPY_LIMIT` bytes each) is read back, and all else is made up.
//!
//! - `zeros`: zeros.
//! - `random:SEED`: in the first `PHANTOM_COPY_LIMIT` bytes of a copy, every eighth byte of device
//!   memory is 1 to 7 and the others are 0: small integers of 8, 16, 32 and 64 bits, and finite,
//!   tiny floats of every width. A copy of one byte is 0 or 1, as a bool. The rest is zeros. A
//!   value depends on the seed and its place, so it is the same at every read, whichever kernel
//!   would have changed it.
//!
//! Indices are made up within their limits where a caller sets these (`phantom_limit`).
//!
//! Of these, copies from the host are *known*, as is what it writes in place of a kernel
//! (`phantom_written`); fills and copies within the device are not: they are often the first part
//! of an operator whose kernel then writes there. Copied data is kept until its memory goes back to
//! the driver, or torch (or a pool) gives it to another tensor (`torch_blocks.rs`); so are limits.
//! A kernel's overwrites of the same tensor are unknown here, and what other allocators reuse: a
//! read may return what was copied there before.
//!
//! Zeros are written only over other values, so untouched memory stays untouched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The made-up values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    Zeros,
    Random(u64),
}

/// A range of device memory whose bytes the host reads as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    end: u64,
    /// A copy from the host has written it, or the host in place of a kernel.
    is_known: bool,
}

type Ranges = BTreeMap<u64, Kept>;

/// Values that the host reads.
#[derive(Debug)]
pub struct Values {
    made: Made,
    /// Bytes of a copy with made-up values other than zero.
    limit: usize,
    /// By start, disjoint.
    kept: Mutex<Ranges>,
}

impl Values {
    /// Parses `zeros` or `random:SEED`.
    pub fn parse(text: &str, limit: usize) -> Option<Self> {
        let made = match text.split_once(':') {
            None if text == "zeros" => Made::Zeros,
            Some(("random", seed)) => Made::Random(seed.parse().ok()?),
            _ => return None,
        };
        Some(Self { made, limit, kept: Mutex::default() })
    }

    fn kept(&self) -> MutexGuard<'_, Ranges> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host reads the bytes of the range as they are from now on.
    fn keep(&self, address: u64, bytes: u64, is_known: bool) {
        let mut kept = self.kept();
        let end = address + bytes;
        forget(&mut kept, address, end);
        kept.insert(address, Kept { end, is_known });
    }

    /// The host has written the range.
    pub fn written(&self, address: u64, bytes: u64) {
        self.keep(address, bytes, true);
    }

    /// A fill has written the range, and a kernel perhaps soon after it.
    pub fn filled(&self, address: u64, bytes: u64) {
        self.keep(address, bytes, false);
    }

    /// Makes up integers of `width` bytes in `memory`, which is at `address`, counted from `base`,
    /// within the limits.
    pub fn limit(
        &self,
        memory: &mut [u8],
        address: u64,
        base: u64,
        width: usize,
        limits: Range<i64>,
    ) {
        let span = i128::from(limits.end) - i128::from(limits.start);
        for (index, integer) in memory.chunks_exact_mut(width).enumerate() {
            let offset = address - base + (index * width) as u64;
            let above = match self.made {
                Made::Zeros => 0,
                Made::Random(seed) => i128::from(word(seed, offset) % 7 + 1) % span,
            };
            let made = (i128::from(limits.start) + above) as i64;
            integer.copy_from_slice(&made.to_le_bytes()[..width]);
        }
        self.keep(address, memory.len() as u64, false);
    }

    /// The contents of the range are unknown: a copy into it was skipped, or it went back to the
    /// driver.
    pub fn lost(&self, address: u64, bytes: u64) {
        forget(&mut self.kept(), address, address + bytes);
    }

    /// Whether the host has written all of the range.
    pub fn are_known(&self, address: u64, bytes: u64) -> bool {
        let end = address + bytes;
        let mut at = address;
        for (start, part) in within(&self.kept(), address, end) {
            if start != at || !part.is_known {
                return false;
            }
            at = part.end;
        }
        at == end
    }

    /// A copy within device memory: what is kept carries over, though it is not known there.
    pub fn moved(&self, to: u64, from: u64, bytes: u64) {
        let mut kept = self.kept();
        let carried: Vec<_> = within(&kept, from, from + bytes).collect();
        forget(&mut kept, to, to + bytes);
        for (start, part) in carried {
            let carried = Kept { end: part.end - from + to, is_known: false };
            kept.insert(start - from + to, carried);
        }
    }

    /// Writes `into` as a copy from device memory at `address`, counted from `base`; `device` is
    /// the memory there.
    pub fn read(&self, into: &mut [u8], device: &[u8], address: u64, base: u64) {
        let end = address + into.len() as u64;
        let kept: Vec<_> =
            within(&self.kept(), address, end).map(|(start, part)| (start, part.end)).collect();
        let mut at = address;
        for (start, stop) in kept.into_iter().chain([(end, end)]) {
            self.make_up(into, (at, start), address, base);
            let part = (start - address) as usize..(stop - address) as usize;
            into[part.clone()].copy_from_slice(&device[part]);
            at = stop;
        }
    }

    /// Makes up an unknown `part` of `into`, whose first byte is that at `address`.
    fn make_up(&self, into: &mut [u8], part: (u64, u64), address: u64, base: u64) {
        let (from, to) = ((part.0 - address) as usize, (part.1 - address) as usize);
        let single = into.len() == 1;
        let random = match self.made {
            Made::Zeros => from,
            Made::Random(seed) => {
                let end = to.min(self.limit).max(from);
                for (index, byte) in into.iter_mut().enumerate().take(end).skip(from) {
                    *byte = value(seed, address + index as u64 - base, single);
                }
                end
            }
        };
        clear(&mut into[random..to]);
    }
}

/// 64 random bits for each 8 bytes of device memory.
fn word(seed: u64, offset: u64) -> u64 {
    // SplitMix64 (Steele, Lea and Flood 2014): every bit depends on every bit of its input.
    let mut word = (seed ^ (offset / 8)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The byte at `offset` of device memory.
fn value(seed: u64, offset: u64, single: bool) -> u8 {
    let word = word(seed, offset);
    match (single, offset.is_multiple_of(8)) {
        (true, _) => (word & 1) as u8,
        (false, true) => (word % 7) as u8 + 1,
        (false, false) => 0,
    }
}

/// Zeroes the bytes; writes only over other values.
fn clear(bytes: &mut [u8]) {
    for part in bytes.chunks_mut(4096) {
        if part.iter().any(|&byte| byte != 0) {
            part.fill(0);
        }
    }
}

/// The parts of ranges in `start..end`, in order.
fn within(kept: &Ranges, start: u64, end: u64) -> impl Iterator<Item = (u64, Kept)> + '_ {
    let first = kept.range(..start).next_back().filter(|&(_, part)| part.end > start);
    first
        .into_iter()
        .chain(kept.range(start..end))
        .map(move |(&from, &part)| (from.max(start), Kept { end: part.end.min(end), ..part }))
}

/// Takes `start..end` out of the ranges.
fn forget(kept: &mut Ranges, start: u64, end: u64) {
    let first = kept.range(..start).next_back().filter(|&(_, part)| part.end > start);
    let hit: Vec<_> =
        first.into_iter().chain(kept.range(start..end)).map(|(&from, &to)| (from, to)).collect();
    for (from, part) in hit {
        kept.remove(&from);
        if from < start {
            kept.insert(from, Kept { end: start, ..part });
        }
        if part.end > end {
            kept.insert(end, part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &Values, device: &[u8], address: u64) -> Vec<u8> {
        let mut into = vec![0xee; device.len()];
        values.read(&mut into, device, address, 0);
        into
    }

    #[test]
    fn known_ranges_are_cut_joined_and_carried() {
        let values = Values::parse("zeros", 64).unwrap();
        values.written(10, 10);
        values.written(15, 10);
        values.lost(17, 2);
        let ranges = |start, end| {
            let kept = values.kept();
            within(&kept, start, end).map(|(from, part)| (from, part.end)).collect::<Vec<_>>()
        };
        assert_eq!(ranges(0, 100), [(10, 15), (15, 17), (19, 25)]);
        assert_eq!(ranges(12, 20), [(12, 15), (15, 17), (19, 20)]);
        assert!(values.are_known(10, 7) && values.are_known(20, 5));
        assert!(!values.are_known(9, 2) && !values.are_known(16, 4) && !values.are_known(24, 2));
        values.moved(100, 12, 10);
        assert_eq!(ranges(50, 200), [(100, 103), (103, 105), (107, 110)]);
        assert!(!values.are_known(100, 3), "a kernel may write to a copy, as to a fill");
        values.filled(200, 8);
        assert_eq!(ranges(200, 208), [(200, 208)]);
        assert!(!values.are_known(200, 8));
        values.moved(10, 60, 15);
        assert_eq!(ranges(0, 50), []);
    }

    #[test]
    fn what_was_copied_in_is_read_back_between_what_is_made_up() {
        let device = [9; 24];
        let values = Values::parse("zeros", 64).unwrap();
        values.written(8, 4);
        let seen = read(&values, &device, 0);
        assert_eq!(seen, [&[0; 8][..], &[9; 4], &[0; 12]].concat());
        let values = Values::parse("random:1", 64).unwrap();
        values.written(8, 4);
        let seen = read(&values, &device, 0);
        assert_eq!(seen[8..12], [9; 4]);
        assert!(seen[0] > 0 && seen[16] > 0 && seen[1..8] == [0; 7] && seen[12..16] == [0; 4]);
        assert_eq!(seen, read(&values, &device, 0), "the same however often it is read");
    }

    #[test]
    fn indices_are_within_their_limits_and_no_more_known_than_other_values() {
        for (made, low, high) in
            [("random:3", 0, 2), ("random:3", -5, -1), ("random:3", 2, 900), ("zeros", 4, 6)]
        {
            for width in [1, 2, 4, 8] {
                let values = Values::parse(made, 512).unwrap();
                let mut device = [0xee; 512];
                values.limit(&mut device, 1 << 20, 0, width, low..high.min(127));
                let seen = read(&values, &device, 1 << 20);
                let integers: Vec<_> = seen
                    .chunks_exact(width)
                    .map(|bytes| match width {
                        1 => i64::from(bytes[0] as i8),
                        2 => i64::from(i16::from_le_bytes(bytes.try_into().unwrap())),
                        4 => i64::from(i32::from_le_bytes(bytes.try_into().unwrap())),
                        _ => i64::from_le_bytes(bytes.try_into().unwrap()),
                    })
                    .collect();
                assert!(integers.iter().all(|i| (low..high).contains(i)), "{made}: {integers:?}");
                let differ = integers.iter().any(|i| i != &integers[0]);
                assert_eq!(differ, made != "zeros", "{integers:?}");
                assert!(!values.are_known(1 << 20, 8));
                values.lost(1 << 20, 512);
                assert_ne!(read(&values, &device, 1 << 20), seen);
            }
        }
    }

    #[test]
    fn random_values_are_small_in_every_type_and_end_at_the_limit() {
        let values = Values::parse("random:7", 1 << 10).unwrap();
        let seen = read(&values, &[0; 4096], 1 << 20);
        let words = |n: usize| seen[n..].chunks_exact(8).map(|word| word.try_into().unwrap());
        let integers: Vec<_> = words(0).map(u64::from_le_bytes).collect();
        assert!(integers[..128].iter().all(|n| (1..=7).contains(n)), "{integers:?}");
        assert!(integers[128..].iter().all(|&n| n == 0));
        assert!(words(0).map(f64::from_le_bytes).all(|x| x.is_finite() && x >= 0.0));
        let distinct: std::collections::BTreeSet<_> = integers[..128].iter().collect();
        assert_eq!(distinct.len(), 7);
        let other = Values::parse("random:8", 1 << 10).unwrap();
        assert_ne!(seen, read(&other, &[0; 4096], 1 << 20));
        for address in 0..64 {
            assert!(read(&values, &[0], address)[0] <= 1, "a bool is 0 or 1");
        }
    }

    #[test]
    fn only_what_is_offered_is_understood() {
        for wrong in ["", "ones", "zeros:1", "random", "random:", "random:x"] {
            assert!(Values::parse(wrong, 0).is_none(), "{wrong}");
        }
    }
}
