//! Log-linear histograms in shared memory: eight buckets per doubling over all of u64, so the hot
//! path has no clamp and no branch. A reader converts one to an [`hdrhistogram::Histogram`].

use crate::layout::Shared;
use crate::sync::{AtomicU64, Ordering, bump};

/// Buckets per histogram: one for each value below 8, then eight per doubling up to 2^64, rounded
/// up to a page.
pub const BUCKETS: usize = 512;

/// One histogram, 4 KiB. Counters only grow; one shard writes each (or, for latencies, atomic adds
/// do).
#[repr(C)]
pub struct Buckets([AtomicU64; BUCKETS]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<Buckets>() == 4096);

// SAFETY: repr(C), nothing but atomics; every bit pattern is a value.
unsafe impl Shared for Buckets {}

/// The bucket of `value`: at most 495.
#[inline(always)]
pub const fn bucket_of(value: u64) -> usize {
    // The exponent less three; 0 for values below 16, which have their own buckets.
    let shift = (value | 8).ilog2() as usize - 3;
    shift * 8 + (value >> shift) as usize
}

/// The lowest value of a bucket.
pub fn bucket_floor(bucket: usize) -> u64 {
    if bucket < 16 {
        return bucket as u64;
    }
    let shift = bucket / 8 - 1;
    ((bucket % 8 + 8) as u64) << shift.min(60)
}

/// The highest value of a bucket.
pub fn bucket_ceiling(bucket: usize) -> u64 {
    match bucket {
        0..16 => bucket as u64,
        495.. => u64::MAX,
        _ => bucket_floor(bucket + 1) - 1,
    }
}

impl Buckets {
    /// Counts a value of this bucket ([`bucket_of`]); the caller is the only writer.
    #[inline(always)]
    pub fn count(&self, bucket: usize) {
        debug_assert!(bucket < BUCKETS);
        bump(&self.0[bucket % BUCKETS], 1);
    }

    /// Counts `value`; any thread.
    #[inline]
    pub fn count_shared(&self, value: u64) {
        self.0[bucket_of(value)].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds the counts to `sums`.
    pub fn add_to(&self, sums: &mut [u64; BUCKETS]) {
        for (sum, count) in sums.iter_mut().zip(&self.0) {
            *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
        }
    }
}

/// Counts of one or several histograms, outside the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Box<[u64; BUCKETS]>);

impl Default for Counts {
    fn default() -> Self {
        Counts(Box::new([0; BUCKETS]))
    }
}

/// No process lives to count more in one bucket; a damaged record may claim so, and hdrhistogram's
/// sums must not overflow.
const MOST_COUNT: u64 = 1 << 50;

impl Counts {
    /// The number of values counted.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, &count| sum.wrapping_add(count))
    }

    /// Half of the sum of all values comes from values of at most this: the lower bound of its
    /// bucket. 0 if empty.
    pub fn middle_of_bytes(&self) -> u64 {
        let of = |(bucket, &count): (usize, &u64)| {
            u128::from(bucket_floor(bucket)) * u128::from(count.min(MOST_COUNT))
        };
        let whole: u128 = self.0.iter().enumerate().map(of).sum();
        let mut so_far = 0;
        let middle = self.0.iter().enumerate().position(|bucket| {
            so_far += of(bucket);
            so_far > 0 && so_far * 2 >= whole
        });
        middle.map_or(0, bucket_floor)
    }

    /// As an [`hdrhistogram::Histogram`] of two significant digits, each value scaled by `scale`
    /// (ticks to nanoseconds; 1.0 for bytes). A value counts as its bucket's middle: at most 6.3%
    /// off.
    pub fn to_hdr(&self, scale: f64) -> hdrhistogram::Histogram<u64> {
        // A histogram of two digits over all of u64 takes 30 KiB; the bounds are legal, so `new`
        // can't fail.
        let mut histogram = hdrhistogram::Histogram::<u64>::new(2)
            .unwrap_or_else(|_| unreachable!("2 digits are legal"));
        for (bucket, &count) in self.0.iter().enumerate().filter(|&(_, &count)| count > 0) {
            let floor = bucket_floor(bucket);
            let middle = (floor + (bucket_ceiling(bucket) - floor) / 2) as f64 * scale;
            histogram.auto(true);
            // Casting saturates; recording fails only past the bounds, which resizing lifts.
            let _ = histogram.record_n((middle as u64).min(i64::MAX as u64), count.min(MOST_COUNT));
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_bytes_is_where_half_of_the_bytes_are_and_not_half_of_the_requests() {
        let mut counts = Counts::default();
        assert_eq!(counts.middle_of_bytes(), 0);
        counts.0[bucket_of(512)] = 10_000;
        assert_eq!(counts.middle_of_bytes(), 512);
        counts.0[bucket_of(8 << 20)] = 100;
        assert_eq!(counts.middle_of_bytes(), 8 << 20);
        counts.0.fill(u64::MAX);
        assert!(counts.middle_of_bytes() > 0, "a damaged record says so");
    }

    #[test]
    fn every_value_is_between_its_buckets_floor_and_ceiling_and_buckets_are_within_an_eighth() {
        let mut values: Vec<u64> = (0..4096).collect();
        for power in 12..64 {
            for offset in [0u64, 1, 511, 512, 4000] {
                values.extend([
                    (1u64 << power).wrapping_add(offset),
                    (1u64 << power) - 1 - offset.min(1000),
                ]);
            }
        }
        values.push(u64::MAX);
        for value in values {
            let bucket = bucket_of(value);
            assert!(bucket <= 495, "{value}: {bucket}");
            let (floor, ceiling) = (bucket_floor(bucket), bucket_ceiling(bucket));
            assert!(floor <= value && value <= ceiling, "{value} in {floor}..={ceiling}");
            assert!(ceiling - floor <= floor / 8, "{floor}..={ceiling} is too wide");
        }
    }

    #[test]
    fn hdr_keeps_the_count_and_the_quantiles() {
        let mut counts = Counts::default();
        for value in 1..=1000u64 {
            counts.0[bucket_of(value * 1000)] += 1;
        }
        let hdr = counts.to_hdr(1.0);
        assert_eq!(hdr.len(), 1000);
        let median = hdr.value_at_quantile(0.5) as f64;
        assert!((median / 500_000.0 - 1.0).abs() < 0.08, "{median}");
    }
}
