//! Plain C programs on the simulator's runtime, built here and linked with the library as with
//! libcudart.

#[path = "../../../../tests/common/phantom_owner.rs"]
#[allow(dead_code)]
mod phantom_owner;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A folder with the library under its own name, and the program.
fn built() -> &'static (PathBuf, PathBuf) {
    static BUILT: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .current_dir(HERE)
            .args(["build", "--quiet", "--package", "gruyere-phantom-abi", "--message-format=json"])
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let messages = String::from_utf8(output.stdout).expect("cargo speaks UTF-8");
        let file = messages.split('"').find(|word| word.ends_with("/libphantom_cuda.so"));
        let folder = Path::new(file.expect("cargo names the library")).parent().unwrap().to_owned();
        let program = folder.join("phantom-plain-programs");
        let cc = Command::new("cc")
            .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-o"])
            .arg(&program)
            .arg(Path::new(HERE).join("tests/plain.c"))
            .arg("-L")
            .arg(&folder)
            .arg("-lphantom_cuda")
            .output()
            .expect("cc runs");
        assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
        (folder, program)
    })
}

fn run(part: &str, settings: &[(&str, &str)]) -> Output {
    let (folder, program) = built();
    let output = Command::new(program)
        .arg(part)
        .env("LD_LIBRARY_PATH", folder)
        .env("PHANTOM_KERNEL_NS", "1000000")
        .envs([phantom_owner::variable().unwrap()])
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    assert!(output.status.success(), "{part}: {output:?}");
    output
}

#[test]
fn rows_begin_at_multiples_of_512() {
    run("pitch", &[]);
}

#[test]
fn what_is_in_mapped_memory_belongs_to_its_handle() {
    run("contents", &[("PHANTOM_CONTENTS", "handles")]);
}

#[test]
fn the_twins_take_the_threads_own_stream() {
    run("twins", &[]);
}

#[test]
fn a_device_has_a_current_pool() {
    run("pools", &[]);
}

#[test]
fn the_last_release_of_a_primary_context_frees_its_memory() {
    run("primary", &[]);
}

#[test]
fn the_runtime_names_errors_as_the_runtime_does() {
    run("names", &[]);
}

#[test]
fn other_processes_open_plain_memory_only() {
    run("ipc", &[]);
}

#[test]
fn a_reset_drops_everything() {
    run("reset", &[]);
}

#[test]
fn captured_allocations_are_the_graphs() {
    run("graphs", &[]);
}

#[test]
fn an_event_can_stand_for_a_whole_context() {
    run("context", &[]);
}

#[test]
fn an_older_driver_has_no_such_event() {
    run("old_driver", &[("PHANTOM_WITHOUT", "context_events")]);
}

#[test]
fn managed_memory_is_the_hosts() {
    run("managed", &[]);
}

#[test]
fn the_devices_look_as_they_are_told_to() {
    run(
        "looks",
        &[
            ("PHANTOM_NAME", "NVIDIA GeForce RTX 4090"),
            ("PHANTOM_CAPABILITY", "8.9"),
            ("PHANTOM_MULTIPROCESSORS", "128"),
        ],
    );
}

#[test]
fn nvml_agrees_with_the_driver_and_the_books() {
    run(
        "nvml",
        &[
            ("PHANTOM_DEVICES", "2"),
            ("PHANTOM_TAKEN", "500MiB"),
            ("PHANTOM_HANDLE_TYPES", "posix,fabric"),
        ],
    );
}

#[test]
fn what_no_kernel_wrote_reads_as_zeros_or_as_small_numbers() {
    run("zeros", &[("PHANTOM_VALUES", "zeros")]);
    run("small_numbers", &[("PHANTOM_VALUES", "random:5")]);
}

/// A copy of rows is one copy.
#[test]
fn copies_to_the_host_are_in_the_books() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("books");
    run("host_reads", &[("PHANTOM_BOOKS", file.to_str().unwrap())]);
    let books: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(books["host_reads"], serde_json::json!({"count": 2, "bytes": 1700}));
}

/// Also for a process without exit handlers.
#[test]
fn a_process_with_a_context_says_so_at_once() {
    let folder = tempfile::tempdir().unwrap();
    run("contexts", &[("PHANTOM_CONTEXTS", folder.path().join("context").to_str().unwrap())]);
}

#[test]
fn the_oracle_names_hazards_of_programs() {
    let output = run("oracle", &[("PHANTOM_ORACLE", "on")]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.matches("phantom oracle: a kernel on stream").count(), 1, "{text}");
    assert_eq!(text.matches("which is in no live block").count(), 1, "{text}");
}

/// The same program gives the same log at any load address.
#[test]
fn the_call_log_is_the_same_from_run_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let logs = ["a", "b"].map(|name| {
        let log = folder.path().join(name);
        run("graphs", &[("PHANTOM_CALL_LOG", log.to_str().unwrap())]);
        std::fs::read_to_string(log).unwrap()
    });
    assert_eq!(logs[0], logs[1]);
    let log: Vec<_> = logs[0].lines().collect();
    assert_eq!(log[0], "cudaStreamCreateWithFlags(out, 1) = 0 1342177280");
    assert!(log.contains(&"cudaMallocAsync(out, 1048576, 1342177280) = 0 d+0x200000"), "{log:#?}");
    assert_eq!(log.last(), Some(&"cudaFree(d+0x600000) = 0"));
}
