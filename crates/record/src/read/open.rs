//! Opens records: checks the owner, whether the process lives, and whether the file can be read.
//! Maps nothing; reads the header with `pread`.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::facts::{Process, ProcessFacts};
use crate::header;
use crate::layout::{Header, MAGIC, Section, VERSION};
use crate::mapping::is_locked;
use crate::source::Source;
use crate::sync::Ordering;

/// Users whose records are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owners {
    /// This process's effective user; for root, root's own.
    #[default]
    Mine,
    /// All users, as far as the system permits.
    Any,
}

/// The effective user of this process.
pub fn effective_user() -> u32 {
    // SAFETY: takes nothing and never fails.
    unsafe { libc::geteuid() }
}

impl Owners {
    /// Whether `owner` is among them.
    pub fn include(self, owner: u32) -> bool {
        self == Owners::Any || owner == effective_user()
    }
}

/// Why a record can't be read. The text names the file, the reason and the remedy.
#[derive(Debug)]
pub enum ReadError {
    /// The file can't be opened or read.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
    /// Another user's file, and only our own were wanted.
    Foreign {
        /// The file.
        path: PathBuf,
        /// The owner's user number.
        owner: u32,
    },
    /// Not a regular file.
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Its header is not complete.
    NotReady {
        /// The file.
        path: PathBuf,
        /// Whether its lock is held: a process is making the record.
        locked: Option<bool>,
    },
    /// Not a record.
    NotARecord {
        /// The file.
        path: PathBuf,
    },
    /// The layout of another version.
    Version {
        /// The file.
        path: PathBuf,
        /// The version in the header.
        version: u32,
        /// Whether a process holds its lock.
        locked: Option<bool>,
    },
    /// It holds an impossible value.
    Damaged {
        /// The file.
        path: PathBuf,
        /// The value and its place.
        what: String,
        /// Whether a process holds its lock.
        locked: Option<bool>,
    },
}

impl ReadError {
    /// Whether the file is missing.
    pub fn is_missing(&self) -> bool {
        matches!(self, ReadError::Open { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// Whether the file is another user's, and so was not opened.
    pub fn is_foreign(&self) -> bool {
        matches!(self, ReadError::Foreign { .. })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        match self {
            ReadError::Open { path, .. }
            | ReadError::Foreign { path, .. }
            | ReadError::NotAFile { path }
            | ReadError::NotReady { path, .. }
            | ReadError::NotARecord { path }
            | ReadError::Version { path, .. }
            | ReadError::Damaged { path, .. } => path,
        }
    }
}

impl ReadError {
    /// The reason alone, where the context names the file.
    pub fn reason(&self) -> String {
        match self {
            ReadError::Open { error, .. } => error.to_string(),
            ReadError::Foreign { owner, .. } => format!(
                "belongs to user {owner}, and this is user {}: the records of others are not read \
                 unless that is asked for",
                effective_user()
            ),
            ReadError::NotAFile { .. } => "not a regular file".to_owned(),
            ReadError::NotReady { locked: Some(true), .. } => {
                "its process is still writing the header".to_owned()
            }
            ReadError::NotReady { .. } => {
                "empty or unfinished, and no process writes it".to_owned()
            }
            ReadError::NotARecord { .. } => "not a record of gruyere (no magic)".to_owned(),
            ReadError::Version { version, .. } => format!(
                "written by another version of Gruyère (layout {version}; this command reads \
                 {VERSION})"
            ),
            ReadError::Damaged { what, .. } => {
                format!("damaged: {what}; the file was cut or overwritten")
            }
        }
    }

    /// What to do, if the user named the file.
    fn remedy(&self) -> Option<&'static str> {
        Some(match self {
            ReadError::Open { error, .. } => match error.raw_os_error() {
                Some(libc::ENOENT) => "`gruyere ps` lists the records there are",
                Some(libc::EACCES | libc::EPERM) => {
                    "records are readable by their owner only: run as the user of that process"
                }
                Some(libc::ELOOP) => "links are refused: name the file itself",
                _ => return None,
            },
            ReadError::Foreign { .. } => "as root, `--all-users` asks",
            ReadError::NotAFile { .. } => "name a record (`gruyere ps` lists them)",
            ReadError::NotReady { locked: Some(true), .. } => "try again in a moment",
            ReadError::NotReady { .. } => {
                "`gruyere ps --sweep` removes it once its last write is a minute ago"
            }
            ReadError::NotARecord { .. } => "name another file",
            ReadError::Version { .. } => "use the `gruyere` command of that version",
            ReadError::Damaged { .. } => "delete it, or read another",
        })
    }

    /// The text for a file that nobody named: it was found in the folder of the records.
    pub fn in_folder(&self) -> String {
        let remedy = match self {
            ReadError::NotAFile { .. } | ReadError::NotARecord { .. } => {
                Some("its name is that of a record: remove it, or move it to another folder")
            }
            ReadError::Open { error, .. } if error.raw_os_error() == Some(libc::ELOOP) => {
                Some("links are refused: remove it")
            }
            ReadError::Damaged { locked: Some(false), .. } => {
                Some("`gruyere ps --sweep` removes it")
            }
            ReadError::Damaged { .. } => Some("delete it"),
            _ => self.remedy(),
        };
        self.told(remedy)
    }

    fn told(&self, remedy: Option<&str>) -> String {
        let (path, reason) = (self.path().display(), self.reason());
        match remedy {
            Some(remedy) => format!("{path}: {reason}; {remedy}"),
            None => format!("{path}: {reason}"),
        }
    }

    /// The same, with what is known of the file's lock.
    pub(crate) fn with_lock(mut self, held: Option<bool>) -> ReadError {
        if let ReadError::Version { locked, .. } | ReadError::Damaged { locked, .. } = &mut self {
            *locked = held;
        }
        self
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(self.remedy()))
    }
}

impl std::error::Error for ReadError {}

/// State of a file named like a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its writer holds the lock.
    Live,
    /// No process holds the lock: the writer ended without a clean exit.
    Stale,
    /// Unknown: the record is being made, or the file system has no locks.
    Unknown,
}

/// A file without a magic this old is the remains of a process that died while making it.
const MAKING: Duration = Duration::from_secs(60);

/// An open file that may be a record; only its header was read.
pub struct Opened {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) metadata: Metadata,
    /// A copy of its header, possibly incomplete.
    head: Source<'static>,
}

/// The later of a record's last sign of life and its file's time of change.
pub(crate) fn seen_alive(last_sign: SystemTime, file: &Metadata) -> SystemTime {
    last_sign.max(file.modified().unwrap_or(SystemTime::UNIX_EPOCH))
}

impl Opened {
    /// Opens `path`. Refuses links; does not wait for a pipe.
    pub(crate) fn new(path: &Path, owners: Owners) -> Result<Opened, ReadError> {
        // Checked before opening, so that another user's file stays untouched; the opened file is
        // checked again.
        if let Ok(metadata) = std::fs::symlink_metadata(path) {
            Self::check(path, &metadata, owners)?;
        }
        Self::with(path, libc::O_NOFOLLOW, owners)
    }

    /// Opens a process's descriptor in /proc, which is a link.
    pub(crate) fn descriptor(path: &Path, owners: Owners) -> Result<Opened, ReadError> {
        Self::with(path, 0, owners)
    }

    fn check(path: &Path, metadata: &Metadata, owners: Owners) -> Result<(), ReadError> {
        let owner = metadata.uid();
        if owners.include(owner) {
            return Ok(());
        }
        Err(ReadError::Foreign { path: path.to_owned(), owner })
    }

    fn with(path: &Path, flags: libc::c_int, owners: Owners) -> Result<Opened, ReadError> {
        let failed = |error| ReadError::Open { path: path.to_owned(), error };
        let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        Self::check(path, &metadata, owners)?;
        if !metadata.is_file() {
            return Err(ReadError::NotAFile { path: path.to_owned() });
        }
        let mut head = [0u8; size_of::<Header>()];
        let got = file.read_at(&mut head, 0).map_err(failed)?;
        let head = Source::bytes(&head[..got]).map_err(failed)?;
        Ok(Opened { path: path.to_owned(), file, metadata, head })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's owner.
    pub fn owner(&self) -> u32 {
        self.metadata.uid()
    }

    fn magic(&self) -> Option<u64> {
        self.head.one::<Header>(0).map(|header| header.magic.load(Ordering::Acquire))
    }

    /// Whether the header is still unwritten.
    fn is_unfinished(&self) -> bool {
        self.magic() == Some(0) || self.metadata.len() == 0
    }

    /// Whether a process holds the lock; `None` if unknown.
    pub fn is_locked(&self) -> Option<bool> {
        // An unfinished header does not name its kind of lock yet.
        const OPEN_FILE: u32 = crate::mapping::LockKind::OpenFile as u32;
        let kind =
            self.head.one::<Header>(0).map_or(0, |header| header.lock_kind.load(Ordering::Relaxed));
        let kind = if kind == 0 && self.is_unfinished() { OPEN_FILE } else { kind };
        is_locked(self.file.as_raw_fd(), kind)
    }

    /// The last sign of life by the writer's own clock, which it reads now and then while it works;
    /// else the file's time of change. (Writing through a mapping does not change that time.)
    pub fn last_sign(&self) -> SystemTime {
        let header = self.head.one::<Header>(0).filter(|_| self.magic() == Some(MAGIC));
        let latest = header.map(|header| {
            let (_, first, latest) = header.clock.read(1);
            SystemTime::UNIX_EPOCH + Duration::from_nanos(latest.unwrap_or(first).realtime)
        });
        latest.or_else(|| self.metadata.modified().ok()).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The latest moment at which the process is known to have lived: its last sign of life, or
    /// when a process that started found it alive ([`crate::sweep::tidy`]). A server at rest gives
    /// no sign.
    pub fn last_seen(&self) -> SystemTime {
        seen_alive(self.last_sign(), &self.metadata)
    }

    /// Notes in the file's time of change that the process is alive now.
    pub(crate) fn note_alive(&self) {
        // Only ages are the worse if this fails.
        let _ = self.file.set_modified(SystemTime::now());
    }

    /// The process that the header names; `None` if unreadable.
    pub fn process(&self) -> Option<Process> {
        self.expect_ready().ok()?;
        let offset = self.head.one::<Header>(0)?.sections[Section::Process as usize]
            .offset
            .load(Ordering::Relaxed);
        let mut bytes = [0u8; size_of::<ProcessFacts>()];
        self.file.read_exact_at(&mut bytes, offset).ok()?;
        let facts = Source::bytes(&bytes).ok()?;
        facts.one::<ProcessFacts>(0).map(ProcessFacts::read)
    }

    /// Checks that the header is complete.
    pub(crate) fn expect_ready(&self) -> Result<(), ReadError> {
        match self.magic() {
            Some(MAGIC) => Ok(()),
            _ if self.is_unfinished() => {
                Err(ReadError::NotReady { path: self.path.clone(), locked: self.is_locked() })
            }
            _ => Err(ReadError::NotARecord { path: self.path.clone() }),
        }
    }

    /// Checks the header, and that every table it names lies within the file.
    ///
    /// # Errors
    /// The reason the record can't be read.
    pub fn expect_whole(&self) -> Result<(), ReadError> {
        self.expect_ready()?;
        let length = self.metadata.len();
        let checked = match self.head.one::<Header>(0) {
            Some(header) => header::sections(header, length, &self.path).map(drop),
            None => Err(header::too_short(length, &self.path)),
        };
        checked.map_err(|error| error.with_lock(self.is_locked()))
    }

    /// State of its process, even if the rest of the record is damaged or of another version.
    pub fn state(&self) -> State {
        let is_old = |modified: SystemTime| {
            SystemTime::now().duration_since(modified).is_ok_and(|age| age > MAKING)
        };
        match (self.expect_ready(), self.is_locked()) {
            (Ok(()), Some(true)) => State::Live,
            (Ok(()), Some(false)) => State::Stale,
            (Err(ReadError::NotReady { .. }), Some(false))
                if self.metadata.modified().is_ok_and(is_old) =>
            {
                State::Stale
            }
            _ => State::Unknown,
        }
    }
}
