//! What the oracle knows of each byte.

use crate::streams::StreamKey;

/// A use that may still be under way: everything on `stream` up to `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) stream: StreamKey,
    pub(crate) position: u64,
}

/// The last uses of a byte: one on nearly all of them, so that one needs no memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Uses {
    One(Use),
    Many(Box<[Use]>),
}

impl Uses {
    pub(crate) fn as_slice(&self) -> &[Use] {
        match self {
            Uses::One(one) => std::slice::from_ref(one),
            Uses::Many(many) => many,
        }
    }
}

/// A byte's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// In a live block.
    Live(Live),
    /// Free, used before.
    Past(Past),
}

/// A live block, as far as its bytes must say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) id: u64,
    pub(crate) address: u64,
    /// The capture that it was allocated in, 0: none.
    pub(crate) capture: u64,
}

/// Former use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Past {
    /// The block that had it last; `None`: the pool handed it out or took it back.
    pub(crate) id: Option<u64>,
    /// The capture that the block was allocated in, 0: none.
    pub(crate) capture: u64,
    pub(crate) uses: Uses,
}
