//! Sets of small numbers, a bit each: of streams, and of what belongs to them.
//!
//! To act on every stream that needs something, a set of these costs as much as its members; 64
//! streams that need nothing cost one look.

use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of streams, [`crate::order::streams::ALL_STREAMS`] and the arenas' UNOWNED among them.
pub(crate) const NUMBERS: u32 = 4096;
const BITS: u32 = u64::BITS;
const WORDS: usize = (NUMBERS / BITS) as usize;

/// The numbers in a word, in order.
fn numbers(at: usize, mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(at as u32 * BITS + bit)
    })
}

const fn bit(number: u32) -> u64 {
    1 << (number % BITS)
}

/// A set as long as its highest number needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NumberSet(Vec<u64>);

impl NumberSet {
    /// Makes room for a number, for [`NumberSet::insert_reserved`].
    pub(crate) fn reserve(&mut self, number: u32) {
        let words = (number / BITS) as usize + 1;
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
    }

    pub(crate) fn insert(&mut self, number: u32) {
        self.reserve(number);
        self.insert_reserved(number);
    }

    /// Adds a number with room ([`NumberSet::reserve`]); leaves any other out.
    #[inline(always)]
    pub(crate) fn insert_reserved(&mut self, number: u32) {
        if let Some(word) = self.0.get_mut((number / BITS) as usize) {
            *word |= bit(number);
        }
    }

    #[inline(always)]
    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(word) = self.0.get_mut((number / BITS) as usize) {
            *word &= !bit(number);
        }
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        self.0.get((number / BITS) as usize).is_some_and(|word| word & bit(number) != 0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().enumerate().flat_map(|(at, &word)| numbers(at, word))
    }

    pub(crate) fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// A set of numbers below [`NUMBERS`] that threads share.
pub(crate) struct SharedSet([AtomicU64; WORDS]);

impl Default for SharedSet {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }
}

impl SharedSet {
    /// Adds a number below [`NUMBERS`]; writes nothing if the set has it.
    #[inline(always)]
    pub(crate) fn insert(&self, number: u32) {
        let word = &self.0[(number / BITS) as usize % WORDS];
        if word.load(Ordering::Relaxed) & bit(number) == 0 {
            word.fetch_or(bit(number), Ordering::Release);
        }
    }

    /// Takes a number out; whether the set had it.
    pub(crate) fn remove(&self, number: u32) -> bool {
        let before =
            self.0[(number / BITS) as usize % WORDS].fetch_and(!bit(number), Ordering::SeqCst);
        before & bit(number) != 0
    }

    /// [`SharedSet::remove`] that writes nothing if the set lacks the number.
    pub(crate) fn remove_seen(&self, number: u32) -> bool {
        self.contains(number) && self.remove(number)
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        self.0[(number / BITS) as usize % WORDS].load(Ordering::Acquire) & bit(number) != 0
    }

    /// The numbers below `end`, in order, and perhaps some up to 63 above; numbers that come or go
    /// meanwhile may be among them or not.
    pub(crate) fn iter(&self, end: u32) -> impl Iterator<Item = u32> {
        self.words(end).flat_map(|(at, word)| numbers(at, word.load(Ordering::Acquire)))
    }

    /// Takes out the numbers that [`SharedSet::iter`] returns.
    pub(crate) fn take(&self, end: u32) -> impl Iterator<Item = u32> {
        let taken = |(at, word): (usize, &AtomicU64)| {
            let some = word.load(Ordering::Acquire) != 0;
            numbers(at, if some { word.swap(0, Ordering::AcqRel) } else { 0 })
        };
        self.words(end).flat_map(taken)
    }

    fn words(&self, end: u32) -> impl Iterator<Item = (usize, &AtomicU64)> {
        self.0.iter().take(end.div_ceil(BITS) as usize).enumerate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn both_sets_are_sets(calls in proptest::collection::vec((0u8..3, 0u32..NUMBERS), 0..200)) {
            let (mut set, shared, mut model) =
                (NumberSet::default(), SharedSet::default(), BTreeSet::new());
            for (what, number) in calls {
                if what > 0 {
                    set.insert(number);
                    shared.insert(number);
                    model.insert(number);
                } else {
                    set.remove(number);
                    prop_assert_eq!(shared.remove(number), model.remove(&number));
                }
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!(shared.contains(number), model.contains(&number));
            }
            let model: Vec<u32> = model.into_iter().collect();
            prop_assert_eq!(&set.iter().collect::<Vec<_>>(), &model);
            prop_assert_eq!(&shared.iter(NUMBERS).collect::<Vec<_>>(), &model);
            set.clear();
            prop_assert_eq!(set.iter().count(), 0);
            prop_assert_eq!(&shared.take(NUMBERS).collect::<Vec<_>>(), &model);
            prop_assert_eq!(shared.iter(NUMBERS).count(), 0);
        }
    }
}
