//! Traces of real PyTorch allocator traffic, exact models of the peers, and the benchmark that replays one through the
//! others.

pub mod allocator;
pub mod instant;
pub mod peers;
pub mod trace;
