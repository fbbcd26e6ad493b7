//! The oracle's knowledge of each byte.

use crate::streams::StreamKey;

/// A use that may still run: everything on `stream` up to `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) stream: StreamKey,
    pub(crate) position: u64,
}

/// The last uses of a byte. Nearly all bytes have one, which needs no heap memory.
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

/// The live block of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) id: u64,
    pub(crate) address: u64,
    /// The capture of its allocation, 0: none.
    pub(crate) capture: u64,
}

/// Former use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Past {
    /// The last block with this byte; `None`: the pool handed it out or took it back.
    pub(crate) id: Option<u64>,
    /// The capture of the block's allocation, 0: none.
    pub(crate) capture: u64,
    pub(crate) uses: Uses,
}
