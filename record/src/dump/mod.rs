//! The state of a process's memory, as files have it: JSON, and a snapshot that memory_viz opens.
//!
//! [`state`] is the model. The library fills it from the heap's books, the `gruyere` command from
//! the record of another process.

pub mod alike;
pub mod memory_viz;
pub mod origins;
pub mod page;
pub mod pickle;
pub mod state;

use state::State;
use std::io::{self, Write};

/// Writes a state as JSON.
///
/// # Errors
/// `out`'s.
pub fn write_json(out: &mut dyn Write, state: &State) -> io::Result<()> {
    serde_json::to_writer(&mut *out, state)?;
    out.write_all(b"\n")
}

/// Writes a state as a snapshot of torch's.
///
/// # Errors
/// `out`'s.
pub fn write_snapshot(out: &mut dyn Write, state: &State) -> io::Result<()> {
    Ok(pickle::write(out, &memory_viz::Snapshot::of(state))?)
}
