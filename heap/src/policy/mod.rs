//! When memory is given back, and when somebody is told: the reclaim ladder, low-memory phases,
//! thresholds.

pub mod alerts;
pub mod ladder;
pub mod phase;
pub(crate) mod watching;
