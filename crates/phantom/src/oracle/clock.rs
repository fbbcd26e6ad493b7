//! Vector clocks: the known progress of each stream.

use crate::streams::StreamKey;

/// For each stream, the position up to which its work is known to come before. Missing streams are
/// at 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn of(&self, stream: StreamKey) -> u64 {
        self.0.get(stream as usize).copied().unwrap_or(0)
    }

    pub(crate) fn raise(&mut self, stream: StreamKey, position: u64) {
        let index = stream as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] = self.0[index].max(position);
    }

    /// Joins with `other`: the maximum per stream.
    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Copies `other`, reusing memory.
    pub(crate) fn assign(&mut self, other: &Clock) {
        self.0.clone_from(&other.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_takes_the_later_position_of_each_stream() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.raise(0, 5);
        a.raise(1, 1);
        b.raise(1, 3);
        b.raise(4, 2);
        a.join(&b);
        assert_eq!([a.of(0), a.of(1), a.of(2), a.of(4), a.of(9)], [5, 3, 0, 2, 0]);
    }
}
