//! Periodic work of the allocator: steps, low-memory phases, thresholds, reserves, and returning
//! memory to the driver.

pub(crate) mod alerts;
pub(crate) mod phase;
pub(crate) mod reserve;
pub(crate) mod steps;
pub(crate) mod thresholds;
pub(crate) mod tidying;
pub(crate) mod trim;
pub(crate) mod watching;
