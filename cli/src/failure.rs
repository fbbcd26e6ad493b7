//! How commands end: one table of exit codes, and one way to say what stands in the way.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use gruyere_record::ReadError;

/// What a command's end means; each command's help names those that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Fine = 0,
    /// Something is missing, or could not be read, written or run.
    Failed = 1,
    /// It was read, but some values are not of one moment: the process was killed while it wrote.
    Torn = 3,
    /// A bound that was asked for is passed.
    Past = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command could not do what it was asked for: the input, the reason and the remedy, in one
/// text. It ends with [`Exit::Failed`].
#[derive(Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// With this text.
    pub fn new(text: impl fmt::Display) -> Failure {
        Failure(text.to_string())
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Failure {
        Failure::new(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// A line on stderr of the command `name`. Where nobody reads it any more, that is no trouble of
/// the command's.
pub fn say(name: &str, text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "gruyere {name}: {text}");
}

/// What a command answers.
pub type Ended = Result<Exit, Failure>;

/// Ends the process for a command that is called `name`.
pub fn end(name: &str, ended: Ended) -> ExitCode {
    match ended {
        Ok(exit) => exit.into(),
        Err(failure) => {
            say(name, failure);
            Exit::Failed.into()
        }
    }
}
