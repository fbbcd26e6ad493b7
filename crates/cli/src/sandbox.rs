//! Options shared by `dryrun`, `compare` and `bench --torch`: what the program may change, and how
//! far it runs. The Python package enforces them (`gruyere/_sandbox`).

use std::num::NonZeroU32;
use std::str::FromStr;

use gruyere::config::Size;
use serde::{Serialize, Serializer};

/// What the program may change.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Options {
    /// Keep what the program writes to PATH, a file or a folder; may be repeated. Without a path:
    /// keep all that it writes, without a sandbox.
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true,
          default_missing_value = "")]
    allow_writes: Vec<String>,
    /// Give the program access to the network; by default it has none.
    #[arg(long)]
    allow_network: bool,
    /// Limit on what a run may write to disk; all of it is discarded when the run ends.
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "10GiB")]
    scratch: u64,
}

/// A size in bytes.
///
/// # Errors
/// Not a size.
pub fn bytes(text: &str) -> Result<u64, String> {
    match text.parse()? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Percent(_) => Err("expected a size, as in 512MiB".to_owned()),
    }
}

/// A count that is not 0.
///
/// # Errors
/// Not such a number.
pub fn count(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("expected a whole number from 1 to {}", u32::MAX))
}

/// How far to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// Ends after this many steps of its optimiser.
    Count(NonZeroU32),
    /// Ends by itself.
    All,
}

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        text.parse()
            .map(Self::Count)
            .map_err(|_| "expected a number of steps from 1 on, or all".to_owned())
    }
}

impl Serialize for Steps {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => count.serialize(serializer),
            Self::All => serializer.serialize_str("all"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_a_number_or_all() {
        assert_eq!("all".parse(), Ok(Steps::All));
        for wrong in ["0", "-1", "x", "1.5", ""] {
            assert!(count(wrong).unwrap_err().starts_with("expected a whole number from 1"));
        }
        assert_eq!("3".parse(), Ok(Steps::Count(NonZeroU32::new(3).unwrap())));
        for wrong in ["0", "-1", "", "ALL", "3.5"] {
            assert!(wrong.parse::<Steps>().is_err(), "{wrong}");
        }
    }
}
