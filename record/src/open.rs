//! Opening a record: whose it is, whether its process lives, and why it can't be read. Nothing is
//! mapped here: the header is read with `pread`.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt as _, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::facts::{Process, ProcessFacts};
use super::layout::{Header, MAGIC, Section, VERSION};
use super::mapping::is_locked;
use super::source::Source;
use super::sync::Ordering;

/// Whose records are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owners {
    /// Those of this process's effective user, root's own where it is root.
    #[default]
    Mine,
    /// Those of all users, as far as the system lets us.
    Any,
}

/// This process's effective user.
pub fn effective_user() -> u32 {
    // SAFETY: takes nothing, and never fails.
    unsafe { libc::geteuid() }
}

impl Owners {
    /// Whether the files of `owner` are among them.
    pub fn include(self, owner: u32) -> bool {
        self == Owners::Any || owner == effective_user()
    }
}

/// Why a record can't be read. The text names the file, the reason, and what to do.
#[derive(Debug)]
pub enum ReadError {
    /// The file can't be opened or read.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
    /// Of another user, and nobody asked for those.
    Foreign {
        /// The file.
        path: PathBuf,
        /// The user's number.
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
        /// Whether somebody is making it.
        locked: Option<bool>,
    },
    /// Some other file.
    NotARecord {
        /// The file.
        path: PathBuf,
    },
    /// Another version's layout.
    Version {
        /// The file.
        path: PathBuf,
        /// The version it says.
        version: u32,
        /// Whether somebody holds its lock.
        locked: Option<bool>,
    },
    /// Something in it can't be.
    Damaged {
        /// The file.
        path: PathBuf,
        /// What, and where.
        what: String,
        /// Whether somebody holds its lock.
        locked: Option<bool>,
    },
}

impl ReadError {
    /// The file is not there (any more).
    pub fn is_missing(&self) -> bool {
        matches!(self, ReadError::Open { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }

    /// The file is another user's, and was not opened.
    pub fn is_foreign(&self) -> bool {
        matches!(self, ReadError::Foreign { .. })
    }

    /// The file.
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

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path().display();
        match self {
            ReadError::Open { error, .. } => {
                write!(f, "{path}: {error}")?;
                match error.raw_os_error() {
                    Some(libc::ENOENT) => write!(f, "; `gruyere ps` lists the records there are"),
                    Some(libc::EACCES | libc::EPERM) => {
                        write!(
                            f,
                            "; records are readable by their owner only: run as the user of that \
                             process"
                        )
                    }
                    Some(libc::ELOOP) => write!(f, "; links are refused: name the file itself"),
                    _ => Ok(()),
                }
            }
            ReadError::Foreign { owner, .. } => write!(
                f,
                "{path}: belongs to user {owner}, and this is user {}: the records of others are \
                 not read unless that is asked for; `--all-users` asks",
                effective_user()
            ),
            ReadError::NotAFile { .. } => {
                write!(f, "{path}: not a regular file; name a record (`gruyere ps` lists them)")
            }
            ReadError::NotReady { locked: Some(true), .. } => {
                write!(f, "{path}: its process is still writing the header; try again in a moment")
            }
            ReadError::NotReady { .. } => {
                write!(
                    f,
                    "{path}: empty or unfinished, and nobody writes it; `gruyere ps --sweep` \
                     removes it"
                )
            }
            ReadError::NotARecord { .. } => {
                write!(f, "{path}: not a record of gruyere (no magic); name another file")
            }
            ReadError::Version { version, .. } => write!(
                f,
                "{path}: written by another version of Gruyère (layout {version}; this command \
                 reads {VERSION}); use the `gruyere` command of that version"
            ),
            ReadError::Damaged { what, .. } => {
                write!(
                    f,
                    "{path}: damaged: {what}; the file was cut or overwritten: delete it, or read \
                     another"
                )
            }
        }
    }
}

impl std::error::Error for ReadError {}

/// How it stands with a file that is named like a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its writer holds the lock.
    Live,
    /// Nobody does: the process ended without a clean exit.
    Stale,
    /// Being made, or the file system has no locks: can't be told.
    Unknown,
}

/// A file without a magic this old was left by a process that died while making it.
const MAKING: Duration = Duration::from_secs(60);

/// An open file that may be a record, of which only the header was read.
pub struct Opened {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) metadata: Metadata,
    /// A copy of its header, as much of it as there is.
    head: Source<'static>,
}

impl Opened {
    /// Opens `path`. Links are refused, and a pipe is not waited for.
    pub(super) fn new(path: &Path, owners: Owners) -> Result<Opened, ReadError> {
        // Before it is opened, so that another user's file is not even touched; what is opened in
        // the end is asked again.
        if let Ok(metadata) = std::fs::symlink_metadata(path) {
            Self::check(path, &metadata, owners)?;
        }
        Self::with(path, libc::O_NOFOLLOW, owners)
    }

    /// Opens one of a process's descriptors in /proc, which are links.
    pub(super) fn descriptor(path: &Path, owners: Owners) -> Result<Opened, ReadError> {
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

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn magic(&self) -> Option<u64> {
        self.head.one::<Header>(0).map(|header| header.magic.load(Ordering::Acquire))
    }

    /// Nobody has written the header yet.
    fn is_unfinished(&self) -> bool {
        self.magic() == Some(0) || self.metadata.len() == 0
    }

    /// Whether somebody holds the lock; `None` where that can't be told.
    pub fn is_locked(&self) -> Option<bool> {
        // Not ready: its kind of lock is not written yet either.
        const OPEN_FILE: u32 = super::mapping::LockKind::OpenFile as u32;
        let kind =
            self.head.one::<Header>(0).map_or(0, |header| header.lock_kind.load(Ordering::Relaxed));
        let kind = if kind == 0 && self.is_unfinished() { OPEN_FILE } else { kind };
        is_locked(self.file.as_raw_fd(), kind)
    }

    /// The last sign of life: by the writer's own clock, which it looks at every now and then while
    /// it works; else when the file was last changed. (Writing through a mapping does not change
    /// the file's time.)
    pub fn last_sign(&self) -> SystemTime {
        let header = self.head.one::<Header>(0).filter(|_| self.magic() == Some(MAGIC));
        let latest = header.map(|header| {
            let (_, first, latest) = header.clock.read(1);
            SystemTime::UNIX_EPOCH + Duration::from_nanos(latest.unwrap_or(first).realtime)
        });
        latest.or_else(|| self.metadata.modified().ok()).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Whose process it says it is; `None` where that can't be read.
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

    /// That the header is complete.
    pub(super) fn expect_ready(&self) -> Result<(), ReadError> {
        match self.magic() {
            Some(MAGIC) => Ok(()),
            _ if self.is_unfinished() => {
                Err(ReadError::NotReady { path: self.path.clone(), locked: self.is_locked() })
            }
            _ => Err(ReadError::NotARecord { path: self.path.clone() }),
        }
    }

    /// How it stands with its process, also where the rest of the record is damaged or of another
    /// version.
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
