//! The state of a process's memory in files: JSON, and a snapshot for memory_viz.
//!
//! [`state`] is the model. The library fills it from the heap's books, [`from_record`] from another
//! process's record.

pub mod alike;
pub mod concluded;
pub mod from_record;
pub mod live;
pub mod memory_viz;
pub mod origins;
pub mod pickle;
pub mod state;

use state::State;
use std::io::{self, Write};

/// Writes a state as JSON.
///
/// # Errors
/// The error of `out`.
pub fn write_json(out: &mut dyn Write, state: &State) -> io::Result<()> {
    serde_json::to_writer(&mut *out, state)?;
    out.write_all(b"\n")
}

/// Writes a state as a torch snapshot.
///
/// # Errors
/// The error of `out`.
pub fn write_snapshot(out: &mut dyn Write, state: &State) -> io::Result<()> {
    Ok(pickle::write(out, &memory_viz::Snapshot::of(state))?)
}
