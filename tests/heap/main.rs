//! The heap's promises, on the simulator: one file per part of the heap.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/flaky.rs"]
mod flaky;

mod addresses;
mod captures;
mod compaction;
mod device_wide;
mod failures;
mod gauges;
mod ladder;
mod lasting;
mod lifetimes;
mod many_streams;
mod order;
mod ordered;
mod outside;
mod phases;
mod pool_failures;
mod pool_states;
mod pools;
mod program_waits;
mod promises;
mod ranks;
mod sharing;
mod sites;
mod small_runs;
mod spans;
mod streams;
mod tags;
mod threads;
mod thresholds;
mod truth;
mod untold_uses;
mod waits;
mod world;

/// Alerts are the process's: one test at a time listens.
fn alone_with_alerts() -> std::sync::MutexGuard<'static, ()> {
    static LISTENING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    LISTENING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Whether this is the process in which test `name` runs alone. The first call starts that process,
/// fails if the test fails there, and returns false. For state that exists once per process.
#[track_caller]
fn alone(name: &str) -> bool {
    const ALONE: &str = "GRUYERE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
    let done = process.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    false
}
