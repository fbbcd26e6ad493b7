//! The library's entry points: torch's hooks ([`torch`]), its own interface ([`native`]), any
//! program's CUDA calls ([`preload`]), the control API ([`control`]); and the one heap of the
//! process behind them.

pub mod alert;
mod begin;
pub mod control;
mod end;
pub mod fork;
pub mod history;
pub mod loader;
pub mod native;
mod objects;
mod oom;
pub mod pool;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub mod preload;
mod process;
pub mod profiler;
mod program;
pub mod python;
pub mod raise;
mod refusal;
pub mod run_file;
mod sharing;
mod summary;
pub mod torch;
pub mod torch_stats;

pub use begin::{heap, install};
pub use process::current;
