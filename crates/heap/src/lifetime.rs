//! How long the program expects a block to live.

use std::cell::Cell;

/// How long a block is expected to live. Blocks of different lifetimes share no page: that keeps
/// whole pages free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Lifetime {
    /// Unknown.
    #[default]
    Auto = 0,
    /// Workspaces: freed within the operation.
    Transient = 1,
    /// Activations and gradients: freed within the training step.
    Step = 2,
    /// Weights and optimiser state: kept.
    Persistent = 3,
}

/// Number of lifetimes.
pub const LIFETIMES: usize = 4;

impl Lifetime {
    /// All lifetimes, in the order of their numbers.
    pub const ALL: [Self; LIFETIMES] = [Self::Auto, Self::Transient, Self::Step, Self::Persistent];

    /// The lifetime with a number of the C API.
    pub const fn from_u8(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Auto),
            1 => Some(Self::Transient),
            2 => Some(Self::Step),
            3 => Some(Self::Persistent),
            _ => None,
        }
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Transient => "transient",
            Self::Step => "step",
            Self::Persistent => "persistent",
        }
    }
}

/// Tags that one thread may nest.
pub const TAG_DEPTH: u32 = 31;

/// The calling thread's tags for its next requests, in one word, so that the straight path reads
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tags(u64);

/// The thread has entered a pool (`route`); above the 62 bits of [`TAG_DEPTH`] tags.
const ROUTED: u64 = 1 << 63;

impl Tags {
    /// The innermost lifetime.
    #[inline]
    pub fn lifetime(self) -> Lifetime {
        Lifetime::from_u8((self.0 & 3) as u8).unwrap_or_default()
    }

    /// Whether requests may belong to a pool: one test of the sign.
    #[inline]
    pub fn is_routed(self) -> bool {
        self.0 & ROUTED != 0
    }
}

thread_local! {
    // Two bits a tag, the innermost lowest; a plain cell without a destructor, so late frees on a
    // dying thread are safe.
    static TAGS: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// All tags of the calling thread.
#[inline]
pub fn tags() -> Tags {
    Tags(TAGS.with(Cell::get).0)
}

/// The innermost tag of the calling thread.
#[inline]
pub fn current() -> Lifetime {
    tags().lifetime()
}

/// Notes whether the calling thread has entered a pool.
pub(crate) fn set_routed(routed: bool) {
    TAGS.with(|cell| {
        let (tags, depth) = cell.get();
        cell.set((tags & !ROUTED | if routed { ROUTED } else { 0 }, depth));
    });
}

/// Tags the calling thread's next requests. False, and nothing done, if [`TAG_DEPTH`] tags are
/// open.
pub fn push(lifetime: Lifetime) -> bool {
    TAGS.with(|cell| {
        let (tags, depth) = cell.get();
        if depth == TAG_DEPTH {
            return false;
        }
        cell.set((tags & ROUTED | (tags << 2 | lifetime as u64) & !ROUTED, depth + 1));
        true
    })
}

/// Removes the calling thread's innermost tag. False if none is open.
pub fn pop() -> bool {
    TAGS.with(|cell| {
        let (tags, depth) = cell.get();
        if depth == 0 {
            return false;
        }
        cell.set((tags & ROUTED | (tags & !ROUTED) >> 2, depth - 1));
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_nest_and_the_innermost_counts() {
        assert_eq!(current(), Lifetime::Auto);
        assert!(push(Lifetime::Persistent) && push(Lifetime::Step));
        assert_eq!(current(), Lifetime::Step);
        assert!(pop());
        assert_eq!(current(), Lifetime::Persistent);
        assert!(pop() && !pop());
        assert_eq!(current(), Lifetime::Auto);
    }

    #[test]
    fn whether_a_pool_is_entered_is_kept_apart_from_the_tags() {
        set_routed(true);
        for lifetime in (0..TAG_DEPTH).map(|at| Lifetime::ALL[at as usize % LIFETIMES]) {
            assert!(push(lifetime) && tags().is_routed() && current() == lifetime);
        }
        set_routed(false);
        for at in (0..TAG_DEPTH).rev() {
            assert_eq!(current(), Lifetime::ALL[at as usize % LIFETIMES]);
            assert!(!tags().is_routed() && pop());
        }
        assert_eq!(tags(), Tags::default());
    }

    #[test]
    fn a_tag_too_many_is_refused_and_nothing_is_lost() {
        for _ in 0..TAG_DEPTH {
            assert!(push(Lifetime::Transient));
        }
        assert!(!push(Lifetime::Step));
        for _ in 0..TAG_DEPTH {
            assert_eq!(current(), Lifetime::Transient);
            assert!(pop());
        }
        assert_eq!(current(), Lifetime::Auto);
    }
}
