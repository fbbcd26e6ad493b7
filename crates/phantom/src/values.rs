//! Words in memory that streams wait on (`cuStreamWaitValue32`): the values written, and when.
//!
//! A stream's write takes place at the end of its work, which may lie ahead of the host's clock. So
//! each word keeps its whole past and its known future.

use rustc_hash::FxHashMap;

/// Comparison of a word with the awaited value (`CUstreamWaitValue_flags`), over 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// The word is at least the value, in cyclic order.
    AtLeast,
    /// The word equals the value.
    Equal,
    /// The word and the value share a set bit.
    And,
    /// The word and the value share a clear bit.
    Nor,
}

impl Comparison {
    fn holds(self, word: u64, value: u64) -> bool {
        match self {
            Self::AtLeast => word.wrapping_sub(value).cast_signed() >= 0,
            Self::Equal => word == value,
            Self::And => word & value != 0,
            Self::Nor => !(word | value) != 0,
        }
    }
}

/// The condition of a stream's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) address: u64,
    pub(crate) value: u64,
    pub(crate) comparison: Comparison,
}

/// All words ever written. Any other word is 0.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// By address: (time, value) of each write, by time.
    written: FxHashMap<u64, Vec<(u64, u64)>>,
}

impl Values {
    pub(crate) fn write(&mut self, address: u64, value: u64, time: u64) {
        let writes = self.written.entry(address).or_default();
        let place = writes.partition_point(|&(before, _)| before <= time);
        writes.insert(place, (time, value));
    }

    /// The first time from `start` on at which the condition holds; `None`: no known write fulfils
    /// it.
    pub(crate) fn holds_from(&self, start: u64, condition: Condition) -> Option<u64> {
        let Condition { address, value, comparison } = condition;
        let writes = self.written.get(&address).map_or(&[][..], Vec::as_slice);
        let later = writes.partition_point(|&(time, _)| time <= start);
        let now = later.checked_sub(1).map_or(0, |last| writes[last].1);
        if comparison.holds(now, value) {
            return Some(start);
        }
        writes[later..]
            .iter()
            .find(|&&(_, word)| comparison.holds(word, value))
            .map(|&(time, _)| time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_holds_from_the_first_write_that_fulfils_it() {
        let mut values = Values::default();
        let at_least = |value| Condition { address: 8, value, comparison: Comparison::AtLeast };
        assert_eq!(values.holds_from(5, at_least(0)), Some(5), "a word that nobody wrote is 0");
        assert_eq!(values.holds_from(5, at_least(1)), None);
        // Reported in another order than they take place.
        values.write(8, 3, 90);
        values.write(8, 1, 40);
        let held = [(5, 1), (50, 1), (5, 2), (5, 4)]
            .map(|(start, value)| values.holds_from(start, at_least(value)));
        assert_eq!(held, [Some(40), Some(50), Some(90), None]);
        let equal = Condition { comparison: Comparison::Equal, ..at_least(1) };
        assert_eq!(values.holds_from(95, equal), None, "it has been and gone");
    }

    #[test]
    fn words_are_compared_as_cuda_says() {
        use Comparison::*;
        assert!(AtLeast.holds(2, 2) && AtLeast.holds(1, u64::MAX) && !AtLeast.holds(u64::MAX, 1));
        assert!(Equal.holds(7, 7) && !Equal.holds(7, 8));
        assert!(And.holds(6, 2) && !And.holds(6, 1));
        assert!(Nor.holds(6, 1) && !Nor.holds(u64::MAX - 1, 1));
    }
}
