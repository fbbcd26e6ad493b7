//! Faults in a trace, and remedies.

use std::fmt;
use std::path::{Path, PathBuf};

/// A fault at a line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// The file cannot be opened or read.
    Unreadable(String),
    /// The zstd stream is cut short or damaged.
    Compression(String),
    /// The input ends in the middle of a line.
    CutShort,
    /// The input has no event at all.
    Empty,
    /// The line is longer than any event.
    LineTooLong,
    /// The line contains bytes that are not text.
    NotText,
    /// The line is blank.
    Blank,
    /// The line starts with a word that is no verb of the format.
    UnknownVerb(String),
    /// `h` is not followed by `e`, `s` or `d`.
    UnknownHostWait(String),
    /// A missing field, by name.
    MissingField(&'static str),
    /// A field beyond those of the verb.
    ExtraField(String),
    /// A field that is not a number in its range: name, text, largest allowed value.
    BadNumber(&'static str, String, u64),
    /// An allocation reuses an identifier.
    IdReused(u64),
    /// A free or record_stream names an identifier that was never allocated.
    UnknownId(u64),
    /// A free or record_stream names a freed identifier; second, the line of the free.
    DeadId(u64, u64),
    /// A wait names an event that was never recorded.
    UnknownEvent(u64),
    /// More items than a replay can number: the kind, and the largest number.
    TooMany(&'static str, u64),
}

impl Damage {
    /// A remedy for the user.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "check the path and its permissions",
            Self::Compression(_) => "fetch or write the file again; `zstd -t FILE` checks it",
            Self::CutShort => {
                "write the trace again, or end the file with a newline if the line is complete"
            }
            Self::Empty => "record a trace first; traces/FORMAT.md describes the format",
            Self::LineTooLong | Self::NotText => {
                "is this a trace? It is read as zstd or as plain text"
            }
            Self::Blank => "remove the line",
            Self::UnknownVerb(_) | Self::UnknownHostWait(_) => {
                "the verbs are a, f, r, k, e, w, h (e, s or d) and m: see traces/FORMAT.md"
            }
            Self::MissingField(_) | Self::ExtraField(_) => {
                "traces/FORMAT.md lists the fields of each verb"
            }
            Self::BadNumber(..) => "numbers are decimal, without sign or unit",
            Self::IdReused(_) => "number allocations from 1 and never use a number twice",
            Self::UnknownId(_) => "allocate it first; or the beginning of the trace is missing",
            Self::DeadId(..) => "remove the line, or give the later allocation a number of its own",
            Self::UnknownEvent(_) => {
                "record the event first; or drop the wait: an unrecorded event holds nobody up"
            }
            Self::TooMany(..) => "split the trace",
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => write!(f, "cannot read it: {why}"),
            Self::Compression(why) => {
                write!(f, "the zstd stream is damaged or cut short after this line: {why}")
            }
            Self::CutShort => write!(f, "the input ends in the middle of the line"),
            Self::Empty => write!(f, "there is no event in it"),
            Self::LineTooLong => {
                write!(f, "the line is longer than {} bytes", super::reader::LONGEST_LINE)
            }
            Self::NotText => write!(f, "the line is not text"),
            Self::Blank => write!(f, "the line is blank"),
            Self::UnknownVerb(verb) => write!(f, "unknown verb {verb:?}"),
            Self::UnknownHostWait(what) => write!(f, "unknown kind of host wait {what:?}"),
            Self::MissingField(name) => write!(f, "{name} is missing"),
            Self::ExtraField(text) => write!(f, "there is a field too many: {text:?}"),
            Self::BadNumber(name, text, max) => {
                write!(f, "{name} is {text:?}, not a number from 0 to {max}")
            }
            Self::IdReused(id) => write!(f, "id {id} has been allocated before"),
            Self::UnknownId(id) => write!(f, "id {id} was never allocated"),
            Self::DeadId(id, line) => write!(f, "id {id} was freed at line {line}"),
            Self::UnknownEvent(event) => write!(f, "event {event} was never recorded"),
            Self::TooMany(what, max) => write!(f, "more than {max} {what}"),
        }
    }
}

/// An error in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceError {
    file: Option<PathBuf>,
    line: u64,
    damage: Damage,
}

impl TraceError {
    /// `damage` at `line` (0: before the first one).
    pub fn new(line: u64, damage: Damage) -> Self {
        Self { file: None, line, damage }
    }

    /// The same with the name of the file.
    #[must_use]
    pub fn in_file(mut self, path: &Path) -> Self {
        self.file = Some(path.to_owned());
        self
    }

    /// The line, counted from 1; 0 if the file could not be read at all.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The fault.
    pub fn damage(&self) -> &Damage {
        &self.damage
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}: ", file.display())?;
        }
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{} ({})", self.damage, self.damage.remedy())
    }
}

impl std::error::Error for TraceError {}
