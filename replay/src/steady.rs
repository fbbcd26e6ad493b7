//! Gruyère over and over one trace: what its calls cost the host, in instructions and in
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

/// Passes of which the median time counts.
const TIMED_PASSES: usize = 5;

/// What a pass over a trace did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Mallocs of more than 0 bytes.
    pub mallocs: u64,
    /// Frees of those.
    pub frees: u64,
}

/// Gruyère on a stand-in GPU where nothing costs virtual time, for passes over one trace: each
/// frees everything it allocates, so that the first warms up for the others.
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
    /// What is wrong with `conf`.
    pub fn new(trace: &'a Trace, conf: &str) -> Result<Self, BenchError> {
        let bare = trace.allocator_calls_only();
        let stage = PhantomStage::new(&bare, Setup::instant(ample(trace)));
        let gruyere = Gruyere::install(stage.driver(), conf)?;
        Ok(Self { trace, bare, stage, gruyere })
    }

    /// The allocator's calls of the trace, then a free of what it leaves live.
    ///
    /// # Errors
    /// Where a replay breaks off.
    pub fn pass(&mut self) -> Result<Pass, BenchError> {
        let mut blocks = Blocks::new(&self.bare);
        replay_into(&self.bare, &mut self.stage, &mut self.gruyere, &mut Blind, &mut blocks)?;
        blocks.free_all(&self.bare, &mut self.stage, &mut self.gruyere)?;
        let mallocs = |op: &&Op| matches!(op, Op::Alloc { size: 1.., .. });
        let mallocs = self.trace.ops.iter().filter(mallocs).count() as u64;
        Ok(Pass { mallocs, frees: mallocs })
    }
}

/// Host nanoseconds of a malloc or free of Gruyère configured by `conf`: the allocator's calls
/// alone, from a fresh heap on. The program's kernels, events and waits are left out, nothing costs
/// virtual time, the oracle is off. The median of five passes. (A model's time would mean nothing.)
///
/// # Errors
/// What is wrong with `conf`, or where a replay breaks off.
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
