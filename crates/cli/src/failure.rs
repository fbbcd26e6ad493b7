//! Ends of commands: a table of exit codes, and a common form of error messages.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind;
use gruyere_record::ReadError;

/// Exit code of a command; each command's help names those it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Fine = 0,
    /// Missing input, or failure to read, write or run.
    Failed = 1,
    /// Read, but some values belong to different moments (the process was killed while it wrote),
    /// or the record had no room for some blocks.
    Torn = 3,
    /// A requested bound is passed.
    Past = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command failed: the input, the reason and the remedy, in a text. The command ends with
/// [`Exit::Failed`].
#[derive(Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// A failure with this text.
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

/// Ends the process with wrong usage of the command `name`, as clap does.
pub fn wrong_usage(name: &str, kind: ErrorKind, text: impl fmt::Display) -> ! {
    let mut command = crate::Cli::command();
    let command = command.find_subcommand_mut(name).cloned().unwrap_or_default();
    command.bin_name(format!("gruyere {name}")).error(kind, text).exit()
}

/// Prints a line on stderr for the command `name`. A missing reader is not the command's error.
pub fn say(name: &str, text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "gruyere {name}: {text}");
}

/// Result of a command.
pub type Ended = Result<Exit, Failure>;

/// Ends the process for the command `name`.
pub fn end(name: &str, ended: Ended) -> ExitCode {
    match ended {
        Ok(exit) => exit.into(),
        Err(failure) => {
            say(name, failure);
            Exit::Failed.into()
        }
    }
}
