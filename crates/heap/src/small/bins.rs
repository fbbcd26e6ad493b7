//! Bins: the slabs with free slots of each stream.

use crate::lifetime::LIFETIMES;
use crate::small::size_class::CLASSES;

/// No slab: the end of a list.
pub(crate) const NO_SLAB: u32 = u32::MAX;

/// The slabs with free slots of one (lifetime, size class) of a stream.
#[derive(Clone, Copy)]
pub(crate) struct Bin {
    /// The first slab, or [`NO_SLAB`].
    pub(crate) first: u32,
    /// Empty slabs: one stays, so that a lone block that comes and goes costs nothing more.
    pub(crate) empties: u32,
}

/// The bins of a stream. A row of classes is rounded up so that masked numbers need no check.
pub(crate) struct Bins {
    /// By lifetime and class ([`Bins::at`]).
    pub(crate) all: [Bin; LIFETIMES * ROW],
}

const ROW: usize = CLASSES.next_power_of_two();

impl Bins {
    pub(crate) fn new() -> Self {
        Self { all: [Bin { first: NO_SLAB, empties: 0 }; LIFETIMES * ROW] }
    }

    #[inline(always)]
    pub(crate) fn at(lifetime: u8, class: u8) -> usize {
        lifetime as usize % LIFETIMES * ROW + class as usize % ROW
    }
}
