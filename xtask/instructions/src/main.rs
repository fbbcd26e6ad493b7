//! Replays a trace through Gruyère's C ABI on the stand-in GPU and prints how many mallocs and frees that were. `cargo xtask
//! instructions` runs this under callgrind, which counts inside `gruyere_malloc` and `gruyere_free` only.

use std::error::Error;
use std::path::PathBuf;

use gruyere_replay::engine::{Blind, replay};
use gruyere_replay::ours::Gruyere;
use gruyere_replay::stage::{PhantomStage, Setup};
use gruyere_replay::trace::Trace;

/// More than any of the bundled traces needs.
const MEMORY: u64 = 512 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("the trace to replay is missing")?);
    let trace = Trace::open(&path)?;
    let mut stage = PhantomStage::new(&trace, Setup::instant(MEMORY));
    let mut gruyere = Gruyere::install(stage.driver(), "record:on")?;
    let end = replay(&trace, &mut stage, &mut gruyere, &mut Blind)?;
    println!("{} operations, {end:?}", trace.operations);
    Ok(())
}
