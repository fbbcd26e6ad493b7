//! The benchmark: one trace through one allocator, with every requested measurement.

#![deny(unsafe_code)]
#![deny(clippy::unwrap_used)]

use crate::allocator::{AllocError, Allocator};
use crate::call_times::CallSamples;
use crate::clock::Clock;
use crate::engine::{Blind, Blocks, End, Perfect, ReplayError, Watch, replay, replay_into};
use crate::fit;
use crate::measure::Curve;
use crate::ours::Gruyere;
use crate::peers::Torch;
use crate::stage::{Charge, DriverStage, PhantomStage, Setup, Stage, StageError};
use crate::trace::{Op, Trace};
use gruyere::driver::Driver;
use gruyere::heap::driver::timed::Timed;
use gruyere::record::calls::CallTime;
use gruyere_phantom::Costs;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// A device with room to spare has this many times the peak of live. torch's default holds four
/// times the peak on one trace.
const AMPLE: u64 = 8;
/// Timed passes; their median counts.
const TIMED_PASSES: usize = 5;
/// Number of faults in a report.
const LISTED_FAULTS: usize = 10;

/// An allocator of the bench.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The model of torch's default allocator.
    Torch,
    /// The model of torch's allocator with expandable segments.
    Expandable,
    /// Gruyère with a configuration (`GRUYERE_CONF`).
    Gruyere(String),
}

impl Contender {
    /// Name for tables and files.
    pub fn name(&self) -> String {
        match self {
            Self::Torch => "torch".to_owned(),
            Self::Expandable => "expandable".to_owned(),
            Self::Gruyere(conf) if conf.is_empty() => "gruyere".to_owned(),
            Self::Gruyere(conf) => format!("gruyere {conf}"),
        }
    }

    /// Whether this is Gruyère itself, not a model; it has the one heap of the process.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Gruyere(_))
    }

    fn set_up(&self, driver: &Arc<dyn Driver>) -> Result<Box<dyn Allocator>, BenchError> {
        Ok(match self {
            Self::Torch => Box::new(Torch::native(driver).map_err(AllocError::from)?),
            Self::Expandable => Box::new(Torch::expandable(driver).map_err(AllocError::from)?),
            Self::Gruyere(conf) => Box::new(Gruyere::install(driver.clone(), conf)?),
        })
    }

    pub(crate) fn set_up_quietly(
        &self,
        driver: &Arc<dyn Driver>,
    ) -> Result<Box<dyn Allocator>, BenchError> {
        match self {
            Self::Gruyere(conf) => Ok(Box::new(Gruyere::install(driver.clone(), conf)?.quietly())),
            _ => self.set_up(driver),
        }
    }
}

/// Reasons for a failed measurement.
#[derive(Debug)]
pub enum BenchError {
    /// The allocator could not be set up.
    SetUp(AllocError),
    /// A replay broke off.
    Replay(ReplayError),
    /// The device cannot be used.
    Device(StageError),
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetUp(error) => write!(f, "the allocator could not be set up: {error}"),
            Self::Replay(error) => write!(f, "the replay broke off {error}"),
            Self::Device(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for BenchError {}

impl From<AllocError> for BenchError {
    fn from(error: AllocError) -> Self {
        Self::SetUp(error)
    }
}

impl From<ReplayError> for BenchError {
    fn from(error: ReplayError) -> Self {
        Self::Replay(error)
    }
}

impl From<StageError> for BenchError {
    fn from(error: StageError) -> Self {
        Self::Device(error)
    }
}

/// The requested measurements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The clock of all figures except those of [`Wanted::more_clocks`].
    pub clock: Clock,
    /// Further clocks for the measurement of held memory.
    pub more_clocks: Vec<Clock>,
    /// The smallest device that completes.
    pub fit: bool,
    /// The device's and the host's time: on [`Wanted::clock`], or [`Clock::USUAL`] if that is
    /// instant.
    pub timeline: bool,
    /// The prices of driver calls on the timeline.
    pub prices: Costs,
}

/// One trace through one allocator. Bytes and nanoseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// The allocator.
    pub allocator: String,
    /// `GRUYERE_CONF` of the run; `None` for the models.
    pub conf: Option<String>,
    /// False: out of memory even with room to spare.
    pub completed: bool,
    /// The most physical memory held.
    pub peak_reserved: u64,
    /// Peak reserved / peak live.
    pub hold_ratio: f64,
    /// Reserved / live, both summed over the operations.
    pub area_ratio: f64,
    /// Driver calls of the allocator.
    pub driver_calls: u64,
    /// Smallest device that completes, bytes (`--fit`).
    pub smallest_device: Option<u64>,
    /// Smallest device / peak live; with several devices, of the fullest (`--fit`).
    pub fit_ratio: Option<f64>,
    /// Held memory on each clock.
    pub clocks: Vec<Lag>,
    /// Figures on the timeline (`--timeline`).
    pub timeline: Option<Timeline>,
    /// Host nanoseconds per malloc or free, median of several passes; for Gruyère only.
    pub ns_per_operation: Option<f64>,
    /// Times of driver calls by kind; on a real device only, where time is real.
    pub driver_call_times: Vec<CallTime>,
    /// Time of the whole replay, nanoseconds; on a real device only.
    pub replay_ns: Option<u64>,
    /// Held memory over the operations, the maximum of each part.
    pub curve: Vec<u64>,
    /// Violations of stream order and misuses of the driver, the first few. The bench fails unless
    /// empty.
    pub faults: Vec<String>,
    /// Number of faults.
    pub fault_count: usize,
}

/// One run on a clock: 8 us of host per launch, the host at most 10 ms ahead, driver calls free.
#[derive(Clone, Debug, Serialize)]
pub struct Lag {
    /// The clock.
    pub clock: Clock,
    /// False: out of memory even with room to spare.
    pub completed: bool,
    /// The most physical memory held.
    pub peak_reserved: u64,
    /// Peak reserved / peak live.
    pub hold_ratio: f64,
    /// End of the last kernel.
    pub device_end_ns: u64,
    /// The device's time for the second half of the steps; `None` with fewer than two steps.
    pub later_steps_ns: Option<u64>,
}

impl Lag {
    fn of(clock: Clock, trace: &Trace, stage: &PhantomStage, end: &End) -> Self {
        let peak_reserved = stage.held_peak();
        Self {
            clock,
            completed: *end == End::Completed,
            peak_reserved,
            hold_ratio: ratio(peak_reserved, trace.peak_live),
            device_end_ns: stage.time().device_end,
            later_steps_ns: stage.later_steps_ns(),
        }
    }
}

/// Two runs on the timeline of a clock: 8 us of host per launch, the host at most 10 ms ahead.
#[derive(Clone, Debug, Serialize)]
pub struct Timeline {
    /// Peak reserved / peak live with free driver calls, as in the measurements of the real
    /// allocators.
    pub hold_ratio: f64,
    /// Peak reserved / peak live with driver calls charged, as in all figures below.
    pub hold_ratio_charged: f64,
    /// End of the last kernel.
    pub device_end_ns: u64,
    /// The same with an allocator without costs or waits.
    pub perfect_end_ns: u64,
    /// Host time in waits of the allocator.
    pub host_blocked_ns: u64,
    /// Driver calls of the allocator.
    pub driver_calls: u64,
}

impl Timeline {
    /// The device's end, relative to a perfect allocator's.
    pub fn end_ratio(&self) -> f64 {
        self.device_end_ns as f64 / self.perfect_end_ns.max(1) as f64
    }
}

/// Runs `contender` over `trace` on simulated GPUs.
///
/// # Errors
/// If the measurement fails; an out-of-memory or a fault is a result, not an error.
pub fn run(trace: &Trace, contender: &Contender, wanted: &Wanted) -> Result<Run, BenchError> {
    let setup =
        Setup { oracle: true, prices: wanted.prices, ..Setup::at(wanted.clock, ample(trace)) };
    let mut stage = PhantomStage::new(trace, setup);
    let mut curve = Curve::new(trace.operations);
    let mut allocator = contender.set_up(&stage.driver())?;
    let before = stage.allocator_calls();
    let mut blocks = Blocks::new(trace);
    let end = replay_into(trace, &mut stage, &mut *allocator, &mut curve, &mut blocks)?;
    let mut run = report(trace, contender, &stage, &curve, end == End::Completed);
    run.driver_calls = stage.allocator_calls() - before;
    run.clocks.push(Lag::of(wanted.clock, trace, &stage, &end));
    let mut faults = audit(trace, &mut stage, &mut *allocator, blocks)?;
    drop(allocator);
    for &clock in &wanted.more_clocks {
        run.clocks.push(on_clock(trace, contender, clock)?);
    }
    if wanted.timeline {
        let known = wanted.clock.lags().then_some(run.peak_reserved);
        let (timeline, more) = on_the_timeline(trace, contender, wanted, known)?;
        run.timeline = Some(timeline);
        faults.extend(more);
    }
    if wanted.fit {
        run.smallest_device = smallest_device(trace, contender)?;
        run.fit_ratio =
            run.smallest_device.map(|bytes| ratio(bytes, trace.peak_live_of_a_device()));
    }
    run.fault_count = faults.len();
    faults.truncate(LISTED_FAULTS);
    run.faults = faults;
    Ok(run)
}

/// Faults of a replay: violations of stream order and misuses of the driver so far, broken
/// invariants, and memory still held after everything was freed and released.
///
/// # Errors
/// If a free or the release fails.
pub fn audit(
    trace: &Trace,
    stage: &mut PhantomStage,
    allocator: &mut dyn Allocator,
    mut blocks: Blocks,
) -> Result<Vec<String>, BenchError> {
    let mut broken: Vec<String> = allocator.validate().err().into_iter().collect();
    blocks.free_all(trace, stage, allocator)?;
    allocator.release()?;
    broken.extend(allocator.validate().err());
    let mut faults = stage.faults();
    faults.extend(broken.into_iter().map(|what| format!("invariant: {what}")));
    if stage.held() > 0 {
        faults.push(format!("leak: {} bytes are held after everything was freed", stage.held()));
    }
    Ok(faults)
}

/// Runs Gruyère, configured by `GRUYERE_CONF`, over `trace` on the real device behind `driver`, and
/// times its driver calls and the whole replay. The whole includes the program's own calls and a
/// query of held memory after each operation.
///
/// # Errors
/// If the device or the library is unusable.
pub fn run_on_device(
    trace: &Trace,
    driver: Arc<dyn Driver>,
    conf: &str,
) -> Result<Run, BenchError> {
    let timed = Arc::new(Timed::new(driver.clone(), CallSamples::default()));
    let mut gruyere = Gruyere::install(timed.clone(), conf)?;
    let mut stage = DriverStage::new(trace, driver)?;
    // Calls before the first malloc do not count.
    timed.watch().take();
    let start = Instant::now();
    let mut curve = Curve::new(trace.operations);
    let mut blocks = Blocks::new(trace);
    let end = replay_into(trace, &mut stage, &mut gruyere, &mut curve, &mut blocks)?;
    let taken = start.elapsed();
    let mut run =
        report(trace, &Contender::Gruyere(conf.to_owned()), &stage, &curve, end == End::Completed);
    run.replay_ns = u64::try_from(taken.as_nanos()).ok();
    run.driver_call_times = timed.watch().take();
    run.driver_calls = run.driver_call_times.iter().map(|time| time.count).sum();
    stage.host_wait_devices()?;
    // Frees the memory for the next replay.
    blocks.free_all(trace, &mut stage, &mut gruyere)?;
    gruyere.release()?;
    run.faults.extend(gruyere.validate().err().map(|what| format!("invariant: {what}")));
    run.fault_count = run.faults.len();
    Ok(run)
}

fn report(
    trace: &Trace,
    contender: &Contender,
    stage: &impl Stage,
    curve: &Curve,
    completed: bool,
) -> Run {
    let conf = match contender {
        Contender::Gruyere(conf) => Some(conf.clone()),
        _ => None,
    };
    Run {
        allocator: contender.name(),
        conf,
        completed,
        peak_reserved: stage.held_peak(),
        hold_ratio: ratio(stage.held_peak(), trace.peak_live),
        area_ratio: curve.area_ratio(),
        driver_calls: 0,
        smallest_device: None,
        fit_ratio: None,
        clocks: Vec::new(),
        timeline: None,
        ns_per_operation: None,
        driver_call_times: Vec::new(),
        replay_ns: None,
        curve: curve.held().to_vec(),
        faults: Vec::new(),
        fault_count: 0,
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

/// Memory of a device with room to spare for every allocator, bytes.
pub fn ample(trace: &Trace) -> u64 {
    AMPLE * trace.peak_live.max(1 << 30)
}

fn ratio(bytes: u64, peak_live: u64) -> f64 {
    bytes as f64 / peak_live.max(1) as f64
}

/// Live memory over the operations of `trace`, the maximum of each part.
pub fn live_curve(trace: &Trace) -> Vec<u64> {
    let mut curve = Curve::new(trace.operations);
    let mut sizes = vec![0; trace.blocks()];
    let mut live = 0;
    for op in &trace.ops {
        match *op {
            Op::Alloc { size, block, .. } => {
                sizes[block as usize] = crate::trace::rounded(size);
                live += sizes[block as usize];
            }
            Op::Free { block } => live -= sizes[block as usize],
            _ => continue,
        }
        curve.after(live, || 0);
    }
    curve.live().to_vec()
}

/// Memory held by `contender` over `trace` on `clock`, on a device with room to spare. The oracle
/// is off.
///
/// # Errors
/// If the setup fails or the replay breaks off.
pub fn on_clock(trace: &Trace, contender: &Contender, clock: Clock) -> Result<Lag, BenchError> {
    let mut stage = PhantomStage::new(trace, Setup::at(clock, ample(trace)));
    let mut allocator = contender.set_up_quietly(&stage.driver())?;
    let end = replay(trace, &mut stage, &mut *allocator, &mut Blind)?;
    Ok(Lag::of(clock, trace, &stage, &end))
}

/// `known`: held memory with free driver calls, if measured on the same clock.
fn on_the_timeline(
    trace: &Trace,
    contender: &Contender,
    wanted: &Wanted,
    known: Option<u64>,
) -> Result<(Timeline, Vec<String>), BenchError> {
    let clock = if wanted.clock.lags() { wanted.clock } else { Clock::USUAL };
    let at = Setup { oracle: true, ..Setup::at(clock, ample(trace)) };
    let setup = |charge| Setup { prices: wanted.prices, charge, ..at };
    let ideal = Setup { oracle: false, ..setup(Charge::Program) };
    let mut ideal = PhantomStage::new(trace, ideal);
    replay(trace, &mut ideal, &mut Perfect::default(), &mut Blind)?;
    let mut faults = Vec::new();
    let mut timed = |charge| {
        let mut stage = PhantomStage::new(trace, setup(charge));
        let mut allocator = contender.set_up(&stage.driver())?;
        let before = stage.allocator_calls();
        replay(trace, &mut stage, &mut *allocator, &mut Blind)?;
        faults.extend(stage.faults());
        Ok::<_, BenchError>((stage.held_peak(), stage.time(), stage.allocator_calls() - before))
    };
    let held = match known {
        Some(held) => held,
        None => timed(Charge::Program)?.0,
    };
    let (held_charged, time, driver_calls) = timed(Charge::DriverCalls)?;
    let timeline = Timeline {
        hold_ratio: ratio(held, trace.peak_live),
        hold_ratio_charged: ratio(held_charged, trace.peak_live),
        device_end_ns: time.device_end,
        perfect_end_ns: ideal.time().device_end,
        host_blocked_ns: time.blocked_by_allocator,
        driver_calls,
    };
    Ok((timeline, faults))
}

/// The smallest device on which `contender` completes `trace`, on the instant clock and without the
/// oracle, bytes; `None`: no device of up to 16 times the peak of live. Every one of several
/// devices has this size.
///
/// # Errors
/// If the allocator's setup fails or a replay breaks off.
pub fn smallest_device(trace: &Trace, contender: &Contender) -> Result<Option<u64>, BenchError> {
    fit::smallest(trace.peak_live_of_a_device(), |capacity| completes(trace, contender, capacity))
}

/// Whether `contender` completes `trace` on a device of `capacity` bytes, on the instant clock and
/// without the oracle.
///
/// # Errors
/// If the allocator's setup fails or a replay breaks off.
pub fn completes(trace: &Trace, contender: &Contender, capacity: u64) -> Result<bool, BenchError> {
    let mut stage = PhantomStage::new(trace, Setup::instant(capacity));
    let mut allocator = contender.set_up_quietly(&stage.driver())?;
    Ok(replay(trace, &mut stage, &mut *allocator, &mut Blind)? == End::Completed)
}
