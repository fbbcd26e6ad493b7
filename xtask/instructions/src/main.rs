//! Replays a trace, or the random program of so many streams (`streams:N`), through Gruyère's C ABI
//! on the stand-in GPU, configured by the second argument, and prints how many mallocs and frees
//! that were. `cargo xtask instructions` runs this under callgrind, which counts inside
//! `gruyere_malloc` and `gruyere_free` only.

use std::error::Error;
use std::path::PathBuf;

use gruyere_replay::engine::{Blind, replay};
use gruyere_replay::many_streams::Program;
use gruyere_replay::ours::Gruyere;
use gruyere_replay::stage::{PhantomStage, Setup};
use gruyere_replay::trace::Trace;

/// More than any of the bundled traces needs.
const MEMORY: u64 = 512 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let what = arguments.next().ok_or("the trace to replay is missing")?;
    let configuration =
        arguments.next().map_or("record:on".to_owned(), |text| text.to_string_lossy().into_owned());
    let trace = match what.to_str().and_then(|what| what.strip_prefix("streams:")) {
        Some(streams) => Program { streams: streams.parse()?, ..Program::default() }.trace()?,
        None => Trace::open(&PathBuf::from(what))?,
    };
    let mut stage = PhantomStage::new(&trace, Setup::instant(MEMORY));
    let mut gruyere = Gruyere::install(stage.driver(), &configuration)?;
    let end = replay(&trace, &mut stage, &mut gruyere, &mut Blind)?;
    println!("{} operations, {end:?}", trace.operations);
    Ok(())
}
