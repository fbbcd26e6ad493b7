//! The cost of the number of streams: `cargo bench -p gruyere-replay --bench many_streams`.
//!
//! One random program (`gruyere_replay::many_streams`) at 10, 112, 1,000 and 4,000 streams (or the
//! given numbers), through Gruyère's C functions and through the model of torch's default
//! allocator, in turn, on a simulated GPU with ample memory. Prints processor time per malloc or
//! free, including the simulator's driver calls, minus that of the same replay with an allocator
//! that only hands out numbers. Twice: with instant work, and with kernels of 20 us. `--write DIR`
//! writes the programs as traces, for `gruyere bench --trace` and `tests/pytorch/pace --trace`.
//!
//! The model follows torch's rules in Rust, with sets and maps where torch has them. It is not
//! torch: its time is only of the order of torch's.

use gruyere_replay::allocator::Allocator;
use gruyere_replay::engine::{Blind, Blocks, End, Perfect, replay_into};
use gruyere_replay::many_streams::Program;
use gruyere_replay::ours::Gruyere;
use gruyere_replay::peers::Torch;
use gruyere_replay::stage::{Charge, PhantomStage, Setup, Stage};
use gruyere_replay::trace::Trace;
use rustix::time::{ClockId, clock_gettime};
use std::path::PathBuf;

/// Default numbers of streams.
const STREAMS: [u32; 4] = [10, 112, 1000, 4000];
/// Passes; their median counts.
const PASSES: usize = 5;
/// Memory of the device, bytes: torch keeps memory for every stream.
const CAPACITY: u64 = 4 << 40;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The allocator of a pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    /// Only hands out addresses: measures the loop and the program's own device calls.
    Nobody,
    /// The model of torch's default allocator.
    Torch,
    /// Gruyère.
    Gruyere,
}

/// Results of a pass.
#[derive(Clone, Copy)]
struct Pass {
    /// Nanoseconds per malloc or free.
    nanoseconds: f64,
    /// Driver calls per malloc or free.
    calls: f64,
    /// Peak of held memory, bytes.
    held: u64,
}

fn pass(trace: &Trace, setup: Setup, who: Who) -> Outcome<Pass> {
    let mut stage = PhantomStage::new(trace, setup);
    let driver = stage.driver();
    let mut allocator: Box<dyn Allocator> = match who {
        Who::Nobody => Box::new(Perfect::default()),
        Who::Torch => Box::new(Torch::native(&driver)?),
        Who::Gruyere => Box::new(Gruyere::install(driver, "")?),
    };
    let calls = stage.allocator_calls();
    let mut blocks = Blocks::new(trace);
    let start = thread_time();
    let end = replay_into(trace, &mut stage, &mut *allocator, &mut Blind, &mut blocks)?;
    let spent = thread_time() - start;
    if end != End::Completed {
        return Err(format!("{}: {} ran out of memory", trace.name, allocator.name()).into());
    }
    let operations = trace.operations as f64;
    let pass = Pass {
        nanoseconds: spent as f64 / operations,
        calls: (stage.allocator_calls() - calls) as f64 / operations,
        held: stage.held_peak(),
    };
    blocks.free_all(trace, &mut stage, &mut *allocator)?;
    allocator.release()?;
    Ok(pass)
}

/// Processor time of this thread, nanoseconds; other load on the machine matters little.
fn thread_time() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn median(passes: &mut [Pass]) -> Pass {
    passes.sort_by(|a, b| a.nanoseconds.total_cmp(&b.nanoseconds));
    passes[passes.len() / 2]
}

/// The numbers of streams, and a folder for the programs.
fn arguments() -> Outcome<(Vec<u32>, Option<PathBuf>)> {
    let (mut streams, mut folder) = (Vec::new(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            // Cargo's own argument.
            "--bench" => {}
            "--write" => folder = Some(words.next().ok_or("--write: which folder?")?.into()),
            _ => streams.push(
                word.parse().map_err(|_| format!("{word}: a number of streams, or --write DIR"))?,
            ),
        }
    }
    if streams.is_empty() {
        streams.extend(STREAMS);
    }
    Ok((streams, folder))
}

fn main() -> Outcome<()> {
    let (numbers, folder) = arguments()?;
    println!(
        "device   streams   torch ns  gruyere ns  ratio   torch calls  gruyere calls   torch GiB  \
         gruyere GiB"
    );
    for (device, setup) in [
        ("instant", Setup::instant(CAPACITY)),
        ("20 us", Setup { oracle: false, ..Setup::timeline(CAPACITY, Charge::Program) }),
    ] {
        for &streams in &numbers {
            let program = Program { streams, ..Program::default() };
            let trace = program.trace()?;
            if let Some(folder) = &folder {
                std::fs::write(folder.join(format!("{}.trace", trace.name)), program.text())?;
            }
            let mut passes = [Who::Nobody, Who::Torch, Who::Gruyere].map(|who| (who, Vec::new()));
            for _ in 0..PASSES {
                for (who, passes) in &mut passes {
                    passes.push(pass(&trace, setup, *who)?);
                }
            }
            let [nobody, torch, ours] = passes.map(|(_, mut passes)| median(&mut passes));
            let own = |pass: Pass| pass.nanoseconds - nobody.nanoseconds;
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            println!(
                "{device:<8} {streams:>7}  {:>9.0}  {:>10.0}  {:>5.2}  {:>12.2}  {:>13.2}  \
                 {:>10.2}  {:>11.2}",
                own(torch),
                own(ours),
                own(ours) / own(torch),
                torch.calls,
                ours.calls,
                gib(torch.held),
                gib(ours.held)
            );
        }
    }
    Ok(())
}
