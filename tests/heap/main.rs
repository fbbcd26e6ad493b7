//! The heap's promises, on the stand-in GPU: a file for each part of the heap.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/flaky.rs"]
mod flaky;

mod addresses;
mod captures;
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
mod promises;
mod ranks;
mod sites;
mod small_runs;
mod spans;
mod streams;
mod tags;
mod threads;
mod thresholds;
mod truth;
mod waits;

/// Alerts are the process's: one test at a time listens.
fn alone_with_alerts() -> std::sync::MutexGuard<'static, ()> {
    static LISTENING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    LISTENING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
