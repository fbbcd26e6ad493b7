//! The project's models of torch's allocators, on the same traces.

use crate::Outcome;
use gruyere_replay::allocator::Allocator;
use gruyere_replay::engine::{Blind, replay};
use gruyere_replay::fit;
use gruyere_replay::peers::Torch;
use gruyere_replay::stage::{PhantomStage, Setup, Stage};
use gruyere_replay::trace::Trace;

/// Replays the trace through the model on a simulator of its own.
pub fn run(trace: &Trace, expandable: bool, setup: Setup) -> Result<Outcome, String> {
    let mut stage = PhantomStage::new(trace, Setup { oracle: false, ..setup });
    let driver = stage.driver();
    let made = if expandable { Torch::expandable(&driver) } else { Torch::native(&driver) };
    let mut torch = made.map_err(|error| error.to_string())?;
    let start = stage.time();
    let end =
        replay(trace, &mut stage, &mut torch, &mut Blind).map_err(|error| error.to_string())?;
    torch.validate()?;
    let time = stage.time();
    Ok(Outcome::new(&end, trace, stage.held_peak(), (time.now - start.now, time.device_end)))
}

/// The smallest device on which the model completes the trace.
pub fn fit(trace: &Trace, expandable: bool) -> Result<u64, String> {
    let trace = trace.allocator_calls_only();
    let complete = trace.ops.len() as u64;
    let completes = |capacity| {
        Ok::<_, String>(run(&trace, expandable, Setup::instant(capacity))?.reached == complete)
    };
    fit::smallest(trace.peak_live, completes)?.ok_or_else(|| "no device is large enough".to_owned())
}
