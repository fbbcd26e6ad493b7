//! Whether a record is that of the process that it says. Anybody may write a file and put any
//! process's number in it.
#![deny(unsafe_code)]

use std::fmt;
use std::io;

use super::facts::{self, Process};
use super::reader::Reader;

/// What can be said of a record's claim to be a process's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The process is there, is the user's whose file it is, and began when the record says.
    Seen,
    /// The process can't be seen from here (it is in another pid namespace or has ended, or /proc
    /// hides it): the file's owner alone vouches.
    Unseen,
    /// It is another process's number.
    False(Lie),
}

/// How a record's claim is known to be false.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The process is of other users than the file.
    Owner {
        /// The process's number.
        pid: u64,
        /// Its effective user.
        user: u32,
        /// The file's owner.
        owner: u32,
    },
    /// The process began at another time: it is a later, or an earlier one.
    Start {
        /// The process's number.
        pid: u64,
    },
    /// Somebody holds the record's lock, and there is no such process.
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

/// A process as /proc tells it.
struct Seen {
    start_time: u64,
    /// Real, effective, saved, file system's.
    users: [u32; 4],
}

impl Seen {
    /// # Errors
    /// That of reading /proc.
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
        // A dead process's number may be another's by now.
        if reader.is_live() == Some(false) {
            return Claim::Unseen;
        }
        let claim = Self::judge(&reader.process(), reader.owner());
        // It may have ended between the look at the lock and that at /proc.
        if matches!(claim, Claim::False(_)) && reader.is_live() != Some(true) {
            Claim::Unseen
        } else {
            claim
        }
    }

    fn judge(process: &Process, owner: Option<u32>) -> Claim {
        let Some(owner) = owner else { return Claim::Unseen };
        let pid = process.pid;
        // The first pid namespace has one number on all machines; and /proc may be that of another
        // namespace (`unshare --pid` without --mount-proc).
        let is_ours =
            process.pid_namespace == facts::pid_namespace() && process.boot == facts::boot_id();
        if !is_ours || !facts::proc_is_ours() {
            return Claim::Unseen;
        }
        match Seen::read(pid) {
            // Root's file: who can write it can do anything else too. (A process may be root when
            // it makes its record, and another user after.)
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

    /// Whether it is another process's number.
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
