//! Repeated passes of Gruyère over one trace: the host cost of its calls, in instructions and
//! nanoseconds.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::bench::{BenchError, ample};
use crate::engine::{Blind, Blocks, replay, replay_into};
use crate::ours::Gruyere;
use crate::stage::{PhantomStage, Setup};
use crate::trace::{Op, Trace};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Timed passes; their median counts.
const TIMED_PASSES: usize = 5;

/// The work of a pass over a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Mallocs of more than 0 bytes.
    pub mallocs: u64,
    /// Frees of those.
    pub frees: u64,
}

/// Gruyère on a simulated GPU without virtual costs, for passes over one trace: each frees
/// everything it allocates, so the first warms up the others.
pub struct SteadyState<'a> {
    trace: &'a Trace,
    bare: Trace,
    stage: PhantomStage,
    gruyere: Gruyere,
}

impl<'a> SteadyState<'a> {
    /// A fresh heap, configured by `conf`.
    ///
    /// # Errors
    /// If `conf` is invalid; the error says why.
    pub fn new(trace: &'a Trace, conf: &str) -> Result<Self, BenchError> {
        let bare = trace.allocator_calls_only();
        let stage = PhantomStage::new(&bare, Setup::instant(ample(trace)));
        let gruyere = Gruyere::install(stage.driver(), conf)?;
        Ok(Self { trace, bare, stage, gruyere })
    }

    /// Makes the trace's allocator calls, then frees the remaining blocks.
    ///
    /// # Errors
    /// If a replay breaks off.
    pub fn pass(&mut self) -> Result<Pass, BenchError> {
        let mut blocks = Blocks::new(&self.bare);
        replay_into(&self.bare, &mut self.stage, &mut self.gruyere, &mut Blind, &mut blocks)?;
        blocks.free_all(&self.bare, &mut self.stage, &mut self.gruyere)?;
        let mallocs = |op: &&Op| matches!(op, Op::Alloc { size: 1.., .. });
        let mallocs = self.trace.ops.iter().filter(mallocs).count() as u64;
        Ok(Pass { mallocs, frees: mallocs })
    }
}

/// Host nanoseconds per malloc or free of Gruyère configured by `conf`: the allocator's calls
/// alone, from a fresh heap, without the program's kernels, events and waits, without virtual costs
/// and without the oracle. The median of five passes. (A model's time would be meaningless.)
///
/// # Errors
/// If `conf` is invalid, or a replay breaks off.
pub fn ns_per_operation(trace: &Trace, conf: &str) -> Result<f64, BenchError> {
    let bare = trace.allocator_calls_only();
    let mut times = Vec::with_capacity(TIMED_PASSES);
    for _ in 0..TIMED_PASSES {
        let mut stage = PhantomStage::new(&bare, Setup::instant(ample(trace)));
        let mut gruyere = Gruyere::install(stage.driver(), conf)?;
        let start = Instant::now();
        replay(&bare, &mut stage, &mut gruyere, &mut Blind)?;
        times.push(start.elapsed().as_nanos() as f64 / trace.operations.max(1) as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[TIMED_PASSES / 2])
}
