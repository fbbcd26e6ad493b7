//! Size classes: the slot of a small request, and the slab that the slot is cut from.
//!
//! Up to 8 KiB the classes are the multiples of 512 B; above, eight to [`SMALL_MAX`]. Slabs are
//! short, so that a class with few blocks costs a stream little. The number of slots that fill a
//! slab defines a class above 8 KiB: with the tail of the slab counted, no class wastes more than a
//! ninth (11.1%) of it on requests that are multiples of [`ALIGNMENT`] and do not fit the class
//! below.

use gruyere_record::bucket_of;

/// Every block starts at a multiple of this, and every request is rounded up to one (bytes).
pub const ALIGNMENT: u64 = 512;
/// The largest request that slabs serve (bytes).
pub const SMALL_MAX: u64 = gruyere_record::gauges::IN_SLABS;
/// A page: the unit in which spans are cut (bytes); the driver's granule on every device so far.
pub const PAGE: u64 = 2 << 20;
/// Slabs begin at multiples of this, and are one or two of it long (bytes).
pub(crate) const SLAB: u64 = 64 << 10;
pub(crate) const CLASSES: usize = 24;

/// The shape of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeClass {
    /// Bytes of a slot, a multiple of [`ALIGNMENT`].
    pub(crate) slot: u32,
    /// Bytes of a slab, a multiple of [`SLAB`].
    pub(crate) slab: u32,
    /// Reciprocal of the slot in units of [`ALIGNMENT`], for [`SizeClass::slot_of`].
    reciprocal: u64,
}

impl SizeClass {
    pub(crate) const fn slab_bytes(&self) -> u64 {
        self.slab as u64
    }

    /// The slot that holds the byte at `offset` of its slab: a multiplication in place of a
    /// division. Exact, since the offset is below 2^9 units and the slot at most 2^6. For an offset
    /// beyond the slab, any number.
    #[inline]
    pub(crate) const fn slot_of(&self, offset: u64) -> u32 {
        ((offset / ALIGNMENT).wrapping_mul(self.reciprocal) >> 32) as u32
    }
}

/// Classes up to 8 KiB.
const MULTIPLES: u64 = 16;

const fn class(index: usize) -> SizeClass {
    let index = index as u64;
    let (slot, slab) = if index < MULTIPLES {
        ((index + 1) * ALIGNMENT, SLAB)
    } else {
        // From 15 slots down to 8.
        let slots = 15 - (index - MULTIPLES);
        (2 * SLAB / slots / ALIGNMENT * ALIGNMENT, 2 * SLAB)
    };
    let units = slot / ALIGNMENT;
    SizeClass { slot: slot as u32, slab: slab as u32, reciprocal: (1u64 << 32).div_ceil(units) }
}

/// The classes, smallest slot first.
pub(crate) static SIZE_CLASSES: [SizeClass; CLASSES] = {
    let mut classes = [class(0); CLASSES];
    let mut i = 0;
    while i < CLASSES {
        classes[i] = class(i);
        i += 1;
    }
    classes
};

/// Units of [`SMALL_MAX`], a power of two.
const UNITS: usize = (SMALL_MAX / ALIGNMENT) as usize;

/// The class of each number of units from one on, and the record's bucket of as many bytes; 4 KiB
/// in all.
static CLASS_OF_UNITS: [(u8, u8); UNITS] = {
    let mut table = [(0u8, 0u8); UNITS];
    let mut units = 1;
    let mut c = 0;
    while units <= table.len() {
        while (class(c).slot as u64) < units as u64 * ALIGNMENT {
            c += 1;
        }
        table[units - 1] = (c as u8, bucket_of(units as u64 * ALIGNMENT) as u8);
        units += 1;
    }
    assert!(bucket_of(SMALL_MAX) <= u8::MAX as usize);
    table
};

/// `size` rounded up to [`ALIGNMENT`]; `None` if that overflows.
#[inline]
pub(crate) const fn round_up(size: u64, to: u64) -> Option<u64> {
    match size.checked_add(to - 1) {
        Some(sum) => Some(sum & !(to - 1)),
        None => None,
    }
}

/// The class that serves a request of `size` bytes (at most [`SMALL_MAX`]).
#[inline]
pub(crate) fn class_of(size: u64) -> usize {
    CLASS_OF_UNITS[(size.saturating_sub(1) / ALIGNMENT) as usize].0 as usize
}

/// A small request, rounded and classified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Small {
    /// Its bytes, rounded up to [`ALIGNMENT`].
    pub(crate) size: u64,
    pub(crate) class: u8,
    /// The record's bucket of `size`.
    pub(crate) bucket: usize,
}

/// Classifies a request; `None` for size 0 and above [`SMALL_MAX`]. Six instructions.
#[inline(always)]
pub(crate) fn small(requested: u64) -> Option<Small> {
    let last = requested.wrapping_sub(1);
    let &(class, bucket) = CLASS_OF_UNITS.get((last / ALIGNMENT) as usize)?;
    Some(Small { size: (last | (ALIGNMENT - 1)) + 1, class, bucket: usize::from(bucket) })
}

/// [`small`] for a request known to be small.
#[inline(always)]
pub(crate) fn small_again(requested: u64) -> Small {
    let last = requested.wrapping_sub(1);
    let (class, bucket) = CLASS_OF_UNITS[(last / ALIGNMENT) as usize % UNITS];
    Small { size: (last | (ALIGNMENT - 1)).wrapping_add(1), class, bucket: usize::from(bucket) }
}

/// Live bytes of a request: rounded up to the alignment.
#[inline(always)]
pub(crate) fn round(requested: u64) -> u64 {
    requested.saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_size_gets_the_smallest_slot_that_holds_it() {
        for size in (1..=SMALL_MAX).step_by(97).chain([SMALL_MAX, 512, 513, 1 << 13]) {
            let c = class_of(size);
            assert!(u64::from(SIZE_CLASSES[c].slot) >= size);
            assert!(c == 0 || u64::from(SIZE_CLASSES[c - 1].slot) < size);
        }
        assert_eq!(class_of(SMALL_MAX), CLASSES - 1);
    }

    #[test]
    fn the_table_knows_class_and_bucket_of_every_small_size_and_of_no_other() {
        for size in (1..=SMALL_MAX).step_by(97).chain([SMALL_MAX, 512, 513, 1 << 13]) {
            let bucket = bucket_of(round_up(size, ALIGNMENT).unwrap());
            let rounded = round_up(size, ALIGNMENT).unwrap();
            assert_eq!(
                small(size),
                Some(Small { size: rounded, class: class_of(size) as u8, bucket })
            );
            assert_eq!(small(size), Some(small_again(size)));
        }
        assert_eq!([0, SMALL_MAX + 1, u64::MAX].map(small), [None; 3]);
    }

    /// Slots of a slab of the class.
    fn slots(class: &SizeClass) -> u64 {
        class.slab_bytes() / u64::from(class.slot)
    }

    #[test]
    fn no_class_wastes_more_than_a_ninth_with_slab_tails_counted() {
        for (i, class) in SIZE_CLASSES.iter().enumerate().skip(1) {
            let smallest = u64::from(SIZE_CLASSES[i - 1].slot) + ALIGNMENT;
            let waste = 1.0 - (smallest * slots(class)) as f64 / class.slab_bytes() as f64;
            assert!(waste <= 1.0 / 9.0, "class {i} ({class:?}) wastes {waste:.4}");
        }
    }

    #[test]
    fn slots_are_aligned_and_a_slab_has_eight_at_least() {
        for class in &SIZE_CLASSES {
            assert_eq!(u64::from(class.slot) % ALIGNMENT, 0);
            assert!(slots(class) >= 8);
        }
    }

    #[test]
    fn the_reciprocal_finds_the_slot_of_every_aligned_offset() {
        for class in &SIZE_CLASSES {
            for offset in (0..class.slab_bytes()).step_by(ALIGNMENT as usize) {
                assert_eq!(u64::from(class.slot_of(offset)), offset / u64::from(class.slot));
            }
        }
    }
}
