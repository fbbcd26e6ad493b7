//! Bins: where the slabs with free slots of a stream are found, and which classes borrow slots of
//! larger ones.
//!
//! A class with few blocks has no slab of its own, which would lie idle for the most part: it
//! borrows slots of a larger class, up to half a slab of its own.

use crate::pool::lifetime::LIFETIMES;
use crate::small::size_class::{CLASSES, SIZE_CLASSES, SMALL_MAX};

/// No slab: the end of a list.
pub(crate) const NO_SLAB: u32 = u32::MAX;

/// The slabs with free slots of one (lifetime, size class) of a stream.
#[derive(Clone, Copy)]
pub(crate) struct Bin {
    /// The first of them, or [`NO_SLAB`].
    pub first: u32,
    /// An empty slab stays here, so that a lone block that comes and goes costs nothing more.
    pub empties: u32,
    /// Live blocks of this size class that lie in slabs of a larger one.
    pub borrowed: u32,
}

/// The bins of a stream. A row of classes is rounded up so that masked numbers need no check.
pub(crate) struct Bins {
    /// By lifetime and class ([`Bins::at`]).
    pub all: [Bin; LIFETIMES * ROW],
    /// Of each lifetime, a bit for each class whose bin has a slab to lend from: classes below
    /// [`HALF`], and the others.
    lending: [[u64; 2]; LIFETIMES],
}

const ROW: usize = CLASSES.next_power_of_two();

impl Bins {
    pub fn new() -> Self {
        Self {
            all: [Bin { first: NO_SLAB, empties: 0, borrowed: 0 }; LIFETIMES * ROW],
            lending: [[0; 2]; LIFETIMES],
        }
    }

    #[inline(always)]
    pub fn at(lifetime: u8, class: u8) -> usize {
        lifetime as usize % LIFETIMES * ROW + class as usize % ROW
    }

    /// The word and the bit of a class in [`Bins::lending`].
    #[inline(always)]
    fn bit_of(class: u8) -> (usize, u32) {
        let upper = u32::from(class >= HALF);
        (upper as usize, (u32::from(class) - upper * u32::from(HALF)) % u64::BITS)
    }

    /// Notes whether the bin of a class has a slab to lend from.
    #[inline]
    pub fn set_lends(&mut self, lifetime: u8, class: u8, lends: bool) {
        let (word, bit) = Self::bit_of(class);
        let word = &mut self.lending[lifetime as usize % LIFETIMES][word];
        *word = *word & !(1 << bit) | u64::from(lends) << bit;
    }

    /// Whether the bin of a class has a slab to lend from.
    pub fn lends(&self, lifetime: u8, class: u8) -> bool {
        let (word, bit) = Self::bit_of(class);
        self.lending[lifetime as usize % LIFETIMES][word] >> bit & 1 == 1
    }

    /// The next class above `own` with a slab that lends to it one block more. About 20
    /// instructions.
    #[inline(always)]
    pub fn lender(&self, lifetime: u8, own: u8) -> Option<u8> {
        let (word, bit) = Self::bit_of(own);
        let above = (self.lending[lifetime as usize % LIFETIMES][word] >> bit).trailing_zeros();
        let borrowed = self.all[Self::at(lifetime, own)].borrowed;
        let most = *MOST_BORROWED[own as usize % ROW].get(above as usize)?;
        (borrowed < u32::from(most)).then_some(own + above as u8)
    }
}

/// Slots that are lent to smaller classes (bytes): a class borrows from the next of them, and from
/// what lies between.
const LENDERS: [u64; 4] = [4 << 10, 32 << 10, 256 << 10, SMALL_MAX];

/// The largest class that lends to a class; itself for a lender.
static LENDER_OF: [u8; CLASSES] = {
    let mut table = [0; CLASSES];
    let (mut class, mut lender) = (0, 0);
    while class < CLASSES {
        while (SIZE_CLASSES[class].slot as u64) > LENDERS[lender] {
            lender += 1;
        }
        let mut last = class;
        while last + 1 < CLASSES && (SIZE_CLASSES[last].slot as u64) < LENDERS[lender] {
            last += 1;
        }
        table[class] = last as u8;
        class += 1;
    }
    table
};

/// The largest class that lends to `class`.
pub(crate) fn lender_of(class: u8) -> u8 {
    LENDER_OF[class as usize % CLASSES]
}

/// A class, from which on the bits of [`Bins::lending`] are in the second word: no class borrows
/// across it.
const HALF: u8 = {
    let mut class = 0;
    while SIZE_CLASSES[class].slot as u64 <= LENDERS[1] {
        class += 1;
    }
    assert!(class <= 64 && CLASSES - class <= 64);
    class as u8
};

/// The most classes that a class is below its lender.
const REACH: usize = {
    let (mut class, mut reach) = (0, 0);
    while class < CLASSES {
        let above = LENDER_OF[class] as usize - class;
        reach = if above > reach { above } else { reach };
        assert!((class < HALF as usize) == ((LENDER_OF[class] as usize) < HALF as usize));
        class += 1;
    }
    reach
};

/// How many blocks a class may have in slots of the class so many above it: as long as the slots
/// take no more than half of what a slab of its own would. 0 for itself, and beyond its lender.
static MOST_BORROWED: [[u16; REACH + 1]; ROW] = {
    let mut table = [[0; REACH + 1]; ROW];
    let mut own = 0;
    while own < CLASSES {
        let mut above = 1;
        while own + above <= LENDER_OF[own] as usize {
            table[own][above] =
                (SIZE_CLASSES[own].slab_bytes() / 2 / SIZE_CLASSES[own + above].slot as u64) as u16;
            above += 1;
        }
        own += 1;
    }
    table
};

/// The most blocks of class `own` in slots of `lender`.
pub(crate) fn most_borrowed(own: u8, lender: u8) -> u32 {
    u32::from(MOST_BORROWED[own as usize % ROW][usize::from(lender - own)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_class_borrows_from_its_lender_and_what_lies_between_up_to_half_a_slab_of_its_own() {
        for own in 0..CLASSES {
            let lender = usize::from(lender_of(own as u8));
            assert!(lender >= own && lender - own <= REACH);
            for (above, &most) in MOST_BORROWED[own].iter().enumerate() {
                let taken =
                    |blocks: u16| u64::from(SIZE_CLASSES[own + above].slot) * u64::from(blocks);
                if above == 0 || own + above > lender {
                    assert_eq!(most, 0, "class {own} from the one {above} above");
                } else {
                    let half = SIZE_CLASSES[own].slab_bytes() / 2;
                    assert!(
                        taken(most) <= half && taken(most + 1) > half,
                        "class {own}, {above} above"
                    );
                }
            }
        }
    }

    #[test]
    fn every_class_has_a_bit_of_its_own_and_the_next_slab_above_lends() {
        let mut bits = HashSet::new();
        for class in 0..CLASSES as u8 {
            assert!(bits.insert(Bins::bit_of(class)));
            let mut bins = Bins::new();
            let lender = lender_of(class);
            assert_eq!(bins.lender(0, class), None);
            for listed in (class + 1..=lender).rev() {
                let (word, bit) = Bins::bit_of(listed);
                bins.lending[0][word] |= 1 << bit;
                let most = MOST_BORROWED[class as usize][usize::from(listed - class)];
                assert_eq!(bins.lender(0, class), (most > 0).then_some(listed));
                bins.all[Bins::at(0, class)].borrowed = u32::from(most);
                assert_eq!(bins.lender(0, class), None, "no more than {most}");
                bins.all[Bins::at(0, class)].borrowed = 0;
            }
            let (word, bit) = Bins::bit_of(lender + 1);
            if usize::from(lender) + 1 < CLASSES {
                let mut beyond = Bins::new();
                beyond.lending[0][word] |= 1 << bit;
                assert_eq!(beyond.lender(0, class), None, "nothing beyond the lender");
            }
        }
    }
}
