//! What a freed block waits for.

use crate::order::streams::Streams;

/// Streams, each with the epoch that it must be past. Nearly always one, which needs no memory of its own.
#[derive(Debug)]
pub(crate) enum Pending {
    /// One stream.
    One((u32, u64)),
    /// Any number of streams.
    Many(Vec<(u32, u64)>),
}

impl Pending {
    /// A free of this moment, for all of which `users` are done.
    pub(crate) fn behind(users: Vec<u32>, streams: &Streams) -> Self {
        match users[..] {
            [user] => Self::One((user, streams.note_wait(user))),
            _ => Self::Many(users.into_iter().map(|user| (user, streams.note_wait(user))).collect()),
        }
    }

    /// Stream and epoch, one after the other.
    pub(crate) fn as_slice(&self) -> &[(u32, u64)] {
        match self {
            Self::One(wait) => std::slice::from_ref(wait),
            Self::Many(waits) => waits,
        }
    }

    /// Whether all are past it.
    #[inline]
    pub(crate) fn is_over(&self, streams: &Streams) -> bool {
        self.as_slice().iter().all(|&(user, epoch)| streams.completed(user) >= epoch)
    }
}
