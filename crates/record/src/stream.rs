//! The meaning of stream numbers, for every view.
#![deny(unsafe_code)]

use std::fmt;

/// All streams of the device together, for blocks of `cudaMalloc`.
pub const ALL_STREAMS: u32 = 4094;
/// No stream: memory that grows, moves or goes back, a request without a stream.
pub const NO_STREAM: u32 = u32::MAX;

/// A stream's number, shown by its meaning: `0`, `7`, `all`, `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamNumber(pub u32);

impl fmt::Display for StreamNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ALL_STREAMS => f.pad("all"),
            NO_STREAM => f.pad("none"),
            number => number.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_stand_for_no_one_stream_are_words() {
        let shown =
            [0, 7, ALL_STREAMS, NO_STREAM].map(|number| format!("{:<5}|", StreamNumber(number)));
        assert_eq!(shown, ["0    |", "7    |", "all  |", "none |"]);
    }
}
