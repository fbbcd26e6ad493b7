//! What a run did is kept where `history:` says: at its first step, at an out-of-memory, and when
//! the process ends.

mod common;

use common::{GIB, MIB};
use gruyere::door::control::gruyere_mark_step;
use gruyere::door::install;
use gruyere::door::torch::*;
use gruyere::record::run::Run;
use gruyere_phantom::{Config as GpuConfig, Gpu};
use gruyere_phantom_driver::PhantomDriver;
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;

/// Names the folder for the process that this test starts.
const FOLDER: &str = "GRUYERE_TEST_FOLDER";

fn runs(folder: &Path) -> Vec<Run> {
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        assert!(path.to_string_lossy().ends_with(".run.json"), "{} was left", path.display());
        runs.push(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap());
    }
    runs
}

/// The program: three steps of 64 MiB, then more than the device has, then 128 MiB, then its end.
fn program(folder: &Path) {
    let gpu = Arc::new(Gpu::new(GpuConfig::new(GIB)));
    let conf = format!("history:{},name:llama", folder.display());
    install(Arc::new(PhantomDriver::new(gpu)), &conf).unwrap();
    let only = |runs: Vec<Run>| {
        let [run] = runs.try_into().expect("one file, whatever was written before");
        run
    };
    assert!(runs(folder).is_empty());
    for _ in 0..3 {
        let block = gruyere_malloc(64 * MIB as isize, 0, null_mut());
        assert!(!block.is_null());
        gruyere_free(block, 64 * MIB as isize, 0, null_mut());
        gruyere_mark_step();
    }
    // Written at the first of them; the next is due in a minute.
    let run = only(runs(folder));
    assert_eq!(run.devices[0].steps, 1);
    assert!(run.unfinished_at_nanoseconds.is_some_and(|at| at < 60_000_000_000), "if killed now");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(gruyere_malloc(2 * GIB as isize, 0, null_mut()).is_null());
    let run = only(runs(folder));
    assert_eq!((run.devices[0].steps, run.devices[0].out_of_memories), (3, 1));
    assert!(run.unfinished_at_nanoseconds.is_some_and(|at| at > 1_000_000_000));
    assert!(!gruyere_malloc(128 * MIB as isize, 0, null_mut()).is_null());
}

#[test]
fn a_run_is_kept_at_a_step_at_an_out_of_memory_and_at_the_end() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return program(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let runs_folder = folder.path().join("new/runs");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["a_run_is_kept_at_a_step_at_an_out_of_memory_and_at_the_end", "--exact"])
        .env(FOLDER, &runs_folder)
        .env("RANK", "3")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let [run] = runs(&runs_folder).try_into().expect("one run");
    assert_eq!(run.unfinished_at_nanoseconds, None, "it was written at the end");
    let Run { name, rank, devices, .. } = run;
    assert_eq!((name.as_str(), rank, devices.len()), ("llama", Some(3), 1));
    let device = &devices[0];
    assert_eq!((device.live_peak_bytes, device.steps, device.out_of_memories), (128 * MIB, 3, 1));
    assert_eq!(device.timeline.iter().map(|cell| cell.sample.in_use_high).max(), Some(128 * MIB));
}
