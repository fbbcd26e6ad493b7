//! Checks that a record belongs to the process it names. Any user may write a file with any pid in
//! it.
#![deny(unsafe_code)]

use std::fmt;
use std::io;

use crate::facts::{self, Process};
use crate::reader::Reader;

/// The verdict on a record's claim to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The process is there, belongs to the file's owner, and began when the record says.
    Seen,
    /// The process can't be seen from here (it is in another pid namespace, has ended, or /proc
    /// hides it): only the file's owner vouches for it.
    Unseen,
    /// The pid is another process's.
    False(Lie),
}

/// Why a record's claim is false.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The process belongs to other users than the file.
    Owner {
        /// The process's number.
        pid: u64,
        /// Its effective user.
        user: u32,
        /// The file's owner.
        owner: u32,
    },
    /// The process began at another time: it is a later or an earlier one.
    Start {
        /// The process's number.
        pid: u64,
    },
    /// The record's lock is held, but there is no such process.
    Nobody {
        /// The process's number.
        pid: u64,
    },
}

impl fmt::Display for Lie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lie::Owner { pid, user, owner } => write!(
                f,
                "says that it is process {pid}'s, which is user {user}'s, and the file is user \
                 {owner}'s"
            ),
            Lie::Start { pid } => {
                write!(f, "says that it is process {pid}'s, which began at another time")
            }
            Lie::Nobody { pid } => write!(f, "says that it is process {pid}'s, and there is none"),
        }
    }
}

/// A process as /proc shows it.
struct Seen {
    start_time: u64,
    /// Real, effective, saved, and the file system's.
    users: [u32; 4],
}

impl Seen {
    /// # Errors
    /// The system's error from reading /proc.
    fn read(pid: u64) -> io::Result<Seen> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
        let users =
            status.lines().find_map(|line| line.strip_prefix("Uid:")).ok_or_else(unreadable)?;
        let mut users = users.split_whitespace().map(|user| user.parse().ok());
        let mut user = || users.next().flatten().ok_or_else(unreadable);
        Ok(Seen {
            users: [user()?, user()?, user()?, user()?],
            start_time: facts::start_time_of(&format!("/proc/{pid}/stat")),
        })
    }
}

impl Claim {
    /// Judges the record of `reader`.
    pub fn of(reader: &Reader<'_>) -> Claim {
        // A dead process's pid may be another's by now.
        if reader.is_live() == Some(false) {
            return Claim::Unseen;
        }
        let claim = Self::judge(&reader.process(), reader.owner());
        // The process may have ended between the looks at the lock and at /proc.
        if matches!(claim, Claim::False(_)) && reader.is_live() != Some(true) {
            Claim::Unseen
        } else {
            claim
        }
    }

    fn judge(process: &Process, owner: Option<u32>) -> Claim {
        let Some(owner) = owner else { return Claim::Unseen };
        let pid = process.pid;
        // The first pid namespace has the same number on all machines; and /proc may show another
        // namespace (`unshare --pid` without --mount-proc).
        let is_ours =
            process.pid_namespace == facts::pid_namespace() && process.boot == facts::boot_id();
        if !is_ours || !facts::proc_is_ours() {
            return Claim::Unseen;
        }
        match Seen::read(pid) {
            // Root's file: a writer of it could do anything else too. (A process may be root when
            // it makes its record, and another user later.)
            Ok(seen) if owner != 0 && !seen.users.contains(&owner) => {
                Claim::False(Lie::Owner { pid, user: seen.users[1], owner })
            }
            Ok(seen) if process.start_time != seen.start_time => Claim::False(Lie::Start { pid }),
            Ok(_) => Claim::Seen,
            // Gone, or hidden (hidepid=).
            Err(_) if facts::is_there(pid) => Claim::Unseen,
            Err(_) => Claim::False(Lie::Nobody { pid }),
        }
    }

    /// Whether the pid is another process's.
    pub fn is_false(&self) -> bool {
        matches!(self, Claim::False(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::effective_user;

    #[test]
    fn a_record_is_believed_where_its_owner_and_the_start_of_its_process_agree_with_proc() {
        let own = Process::current();
        let user = effective_user();
        let other = user + 65_534;
        let judge = |change: &dyn Fn(&mut Process), owner: u32| {
            let mut process = own.clone();
            change(&mut process);
            Claim::judge(&process, Some(owner))
        };
        let pid = own.pid;
        assert_eq!(judge(&|_| {}, user), Claim::Seen);
        assert_eq!(judge(&|_| {}, other), Claim::False(Lie::Owner { pid, user, owner: other }));
        assert_eq!(
            judge(&|process| process.start_time += 1, user),
            Claim::False(Lie::Start { pid })
        );
        assert_eq!(
            judge(&|process| process.pid = 1 << 40, user),
            Claim::False(Lie::Nobody { pid: 1 << 40 })
        );
        assert_eq!(judge(&|process| process.pid_namespace += 1, other), Claim::Unseen);
        assert_eq!(
            judge(&|process| process.boot = "another machine's".into(), other),
            Claim::Unseen
        );
    }
}
