//! Every bundled trace, and the public ones if available, through the library's C ABI with the
//! oracle on; and planted faults, which a replay must notice.

use gruyere::driver::{DeviceId, DevicePtr, StreamHandle};
use gruyere_replay::allocator::{AllocError, Allocator};
use gruyere_replay::bench::{Contender, Run, Wanted, audit, run};
use gruyere_replay::engine::{Blind, Blocks, End, replay_into};
use gruyere_replay::stage::{PhantomStage, Setup};
use gruyere_replay::trace::Trace;
use std::path::{Path, PathBuf};

fn everything() -> Wanted {
    Wanted { timeline: true, ..Wanted::default() }
}

fn traces_in(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.to_string_lossy().ends_with(".trace.zst"));
    paths.sort();
    paths
}

fn ours(trace: &Trace, conf: &str) -> Run {
    run(trace, &Contender::Gruyere(conf.to_owned()), &everything()).unwrap()
}

#[test]
fn oracle_is_silent_on_every_bundled_trace() {
    let paths = traces_in("../../traces");
    assert_eq!(paths.len(), 7);
    for path in paths {
        let trace = Trace::open(&path).unwrap();
        for conf in ["", "share:off", "backing:fixed"] {
            let run = ours(&trace, conf);
            assert!(run.completed, "{} {conf}", trace.name);
            assert_eq!(run.faults, Vec::<String>::new(), "{} {conf}", trace.name);
            assert!(run.hold_ratio >= 1.0, "{} {conf}: less held than live", trace.name);
        }
    }
}

/// The public traces are not in the repository; the test runs them if they lie beside it.
#[test]
fn oracle_is_silent_on_the_public_traces_at_hand() {
    for path in traces_in("../../../shared/traces/public") {
        let trace = Trace::open(&path).unwrap();
        for contender in
            [Contender::Torch, Contender::Expandable, Contender::Gruyere(String::new())]
        {
            let run = run(&trace, &contender, &everything()).unwrap();
            assert!(run.completed, "{} {}", trace.name, run.allocator);
            assert_eq!(run.faults, Vec::<String>::new(), "{} {}", trace.name, run.allocator);
        }
    }
}

/// The fault of a [`Reckless`] allocator.
#[derive(Clone, Copy, PartialEq)]
enum Sin {
    /// Hands the same memory to another stream at once.
    ReusesAcrossStreams,
    /// Hands the same memory out twice.
    OverlapsLive,
    /// Keeps memory after everything is freed.
    Leaks,
    /// Frees the driver's memory twice.
    FreesTwice,
}

/// One block of memory for everything, and one sin.
struct Reckless {
    sin: Sin,
    driver: std::sync::Arc<dyn gruyere::driver::Driver>,
    memory: DevicePtr,
}

impl Reckless {
    fn new(stage: &PhantomStage, sin: Sin) -> Self {
        let driver = stage.driver();
        let memory = driver.alloc(0, 64 << 20).unwrap();
        Self { sin, driver, memory }
    }
}

impl Allocator for Reckless {
    fn name(&self) -> &str {
        "reckless"
    }
    fn malloc(&mut self, _: u64, _: DeviceId, _: StreamHandle) -> Result<DevicePtr, AllocError> {
        Ok(self.memory)
    }
    fn free(
        &mut self,
        _: DevicePtr,
        _: u64,
        _: DeviceId,
        _: StreamHandle,
    ) -> Result<(), AllocError> {
        Ok(())
    }
    fn record_stream(&mut self, _: DevicePtr, _: StreamHandle) -> Result<(), AllocError> {
        Ok(())
    }
    fn release(&mut self) -> Result<(), AllocError> {
        if self.sin != Sin::Leaks {
            self.driver.free(0, self.memory)?;
        }
        if self.sin == Sin::FreesTwice {
            self.driver.free(0, self.memory).unwrap_err();
        }
        Ok(())
    }
    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

fn faults_of(sin: Sin, text: &str) -> Vec<String> {
    let trace = Trace::read("planted", text.as_bytes()).unwrap();
    let mut stage = PhantomStage::new(&trace, Setup { oracle: true, ..Setup::instant(1 << 30) });
    let mut reckless = Reckless::new(&stage, sin);
    let mut blocks = Blocks::new(&trace);
    let end = replay_into(&trace, &mut stage, &mut reckless, &mut Blind, &mut blocks);
    assert_eq!(end, Ok(End::Completed));
    audit(&trace, &mut stage, &mut reckless, blocks).unwrap()
}

#[test]
fn planted_faults_are_reported() {
    let one_stream = "a 1 512 0 0\nk 0 1\nf 1\na 2 512 0 0\nk 0 1\nf 2\n";
    let two_streams = "a 1 512 0 0\nk 0 1\nf 1\na 2 512 0 7\nk 7 1\nf 2\n";
    let both_live = "a 1 512 0 0\nk 0 1\na 2 512 0 0\nk 0 1\nf 1\nf 2\n";
    let event_between = "a 1 512 0 0\nk 0 1\nf 1\ne 9 0\nw 7 9\na 2 512 0 7\nk 7 1\nf 2\n";
    assert_eq!(faults_of(Sin::ReusesAcrossStreams, one_stream), Vec::<String>::new());
    assert_eq!(faults_of(Sin::ReusesAcrossStreams, event_between), Vec::<String>::new());
    assert_eq!(faults_of(Sin::ReusesAcrossStreams, two_streams).len(), 1);
    let overlap = faults_of(Sin::OverlapsLive, both_live);
    assert!(overlap[0].contains("live"), "{overlap:?}");
    let leak = faults_of(Sin::Leaks, one_stream);
    assert!(leak.len() == 1 && leak[0].starts_with("leak: "), "{leak:?}");
    let twice = faults_of(Sin::FreesTwice, one_stream);
    assert!(twice.len() == 1 && twice[0].starts_with("misuse of the driver: "), "{twice:?}");
}
