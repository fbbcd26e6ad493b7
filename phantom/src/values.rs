//! Words in memory that streams wait on (`cuStreamWaitValue32`): what was written to each, and
//! when.
//!
//! A write of work takes place at the end of that work, which may lie ahead of the host's clock. So
//! each word keeps its whole past and the part of its future that is known.

use rustc_hash::FxHashMap;

/// How a word is compared with the value that a stream waits for (`CUstreamWaitValue_flags`), over
/// 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// It is at least that, counted in a circle.
    AtLeast,
    /// It is that.
    Equal,
    /// It has a bit of that set.
    And,
    /// It lacks a bit that that lacks too.
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

/// What a stream waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) address: u64,
    pub(crate) value: u64,
    pub(crate) comparison: Comparison,
}

/// All words that were ever written. One that was not is 0.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// By address: when what was written, by time.
    written: FxHashMap<u64, Vec<(u64, u64)>>,
}

impl Values {
    pub(crate) fn write(&mut self, address: u64, value: u64, time: u64) {
        let writes = self.written.entry(address).or_default();
        let place = writes.partition_point(|&(before, _)| before <= time);
        writes.insert(place, (time, value));
    }

    /// When the condition holds for the first time from `start` on; `None`: with no write that is
    /// known.
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
        // Told in another order than they take place.
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
