//! Replays a trace, or the random program of so many streams (`streams:N`), through Gruyère's C ABI
//! on the stand-in GPU, configured by the second argument, at most as many operations a second as
//! the third says, and prints how many mallocs and frees that were. `cargo xtask instructions` runs
//! this under callgrind, which counts inside `gruyere_malloc` and `gruyere_free` only.

use std::error::Error;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gruyere_replay::engine::{Watch, replay};
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
    let pace = match arguments.next() {
        Some(text) => text.to_str().ok_or("the pace is a number")?.parse()?,
        None => u32::MAX,
    };
    let trace = match what.to_str().and_then(|what| what.strip_prefix("streams:")) {
        Some(streams) => Program { streams: streams.parse()?, ..Program::default() }.trace()?,
        None => Trace::open(&PathBuf::from(what))?,
    };
    let mut stage = PhantomStage::new(&trace, Setup::instant(MEMORY));
    let mut gruyere = Gruyere::install(stage.driver(), &configuration)?;
    let end = replay(&trace, &mut stage, &mut gruyere, &mut Paced::new(pace))?;
    println!("{} operations, {end:?}", trace.operations);
    Ok(())
}

/// Operations between two looks at the clock.
const STRETCH: u32 = 100;

/// Holds a replay back to a number of operations a second: so that one lasts as long on a fast
/// machine as those who read it meanwhile need.
struct Paced {
    stretch: Duration,
    operations: u32,
    next: Instant,
}

impl Paced {
    fn new(operations_per_second: u32) -> Self {
        let stretch = Duration::from_secs(STRETCH.into()) / operations_per_second.max(1);
        Self { stretch, operations: 0, next: Instant::now() + stretch }
    }
}

impl Watch for Paced {
    fn after(&mut self, _live: u64, _held: impl FnOnce() -> u64) {
        self.operations += 1;
        if self.operations.is_multiple_of(STRETCH) {
            sleep(self.next.saturating_duration_since(Instant::now()));
            self.next += self.stretch;
        }
    }
}
