//! What the allocator does from time to time: steps, phases, thresholds, reserves, giving memory
//! back.

pub(crate) mod alerts;
pub(crate) mod phase;
pub(crate) mod reserve;
pub(crate) mod steps;
pub(crate) mod thresholds;
pub(crate) mod trim;
pub(crate) mod watching;
