//! Traces of real PyTorch allocator traffic, exact models of other allocators, and an engine that
//! replays a trace through an allocator.

pub mod allocator;
pub mod bench;
pub mod call_times;
pub mod clock;
pub mod drawn;
pub mod engine;
pub mod fit;
pub mod floor;
pub mod held_floor;
pub mod hold;
pub mod many_streams;
pub mod measure;
pub mod observe;
pub mod ours;
pub mod peers;
pub mod stage;
pub mod trace;

pub use gruyere_phantom::{Costs, PriceError, Prices};
