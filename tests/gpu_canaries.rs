//! tests/gpu/canaries: no word of a block is changed by anybody but its owner, and where one is,
//! that is seen. On the stand-in, and on a driver that runs the canaries' kernels on the host.

#[path = "common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn cc(arguments: &[&str], libraries: &[&str], out: &Path) {
    let made = Command::new("cc")
        .current_dir(ROOT)
        .args(arguments)
        .arg("-o")
        .arg(out)
        .args(libraries)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// A folder with the program, the library, the stand-in under libcuda's name, and the driver that
/// runs kernels.
fn folder() -> &'static Path {
    static BUILT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let phantom = phantom_library::library();
        std::os::unix::fs::symlink(phantom, folder.path().join("libcuda.so.1")).unwrap();
        let sources =
            ["tests/gpu/canaries/main.c", "tests/gpu/probe/driver.c", "tests/gpu/probe/kernels.c"];
        let flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-Iinclude"];
        cc(
            &[&flags[..], &sources[..]].concat(),
            &["-ldl", "-lpthread"],
            &folder.path().join("canaries"),
        );
        let flags = [
            "-shared",
            "-fPIC",
            "-O3",
            "-Wall",
            "-Wextra",
            "-Werror",
            "tests/gpu/probe/test/running.c",
        ];
        let stand_in = [
            "-L",
            folder.path().to_str().unwrap(),
            "-Wl,--no-as-needed",
            "-l:libcuda.so.1",
            "-ldl",
        ];
        cc(&flags, &stand_in, &folder.path().join("librunning.so"));
        folder
    });
    folder.path()
}

/// The library that cargo built for this very test.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libgruyere.so")
}

fn run(arguments: &[&str], settings: &[(&str, &str)]) -> (Output, Value) {
    let document = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new(folder().join("canaries"))
        // Rounds, since a machine that does other work too gets nowhere in seconds.
        .args(["--seconds", "1", "--rounds", "40", "--threads", "3", "--fill", "0.02"])
        .arg("--library")
        .arg(library())
        .arg("--json")
        .arg(document.path())
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder())
        .env("PHANTOM_QUIET", "1")
        .envs([phantom_library::phantom_owner::variable().unwrap()])
        .env_remove("GRUYERE_CONF")
        .env_remove("LD_PRELOAD")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let told = serde_json::from_slice(&std::fs::read(document.path()).unwrap())
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output, told)
}

/// With kernels that run: by the driver of the tests' own, which the library finds in the global
/// scope.
fn run_with_kernels(arguments: &[&str]) -> (Output, Value) {
    let driver = folder().join("librunning.so");
    let driver = driver.to_str().unwrap();
    let (output, told) = run(
        &[arguments, &["--driver", driver]].concat(),
        &[("LD_PRELOAD", driver), ("RUNNING_STALE", "1")],
    );
    assert_eq!(told["kernels"], 1, "{output:?}");
    (output, told)
}

#[test]
fn blocks_keep_what_was_written_and_nothing_is_left() {
    let (output, told) = run(&[], &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        (&told["kernels"], &told["sees_a_fault"], &told["valid"]),
        (&0.into(), &1.into(), &1.into())
    );
    assert!(
        told["blocks"].as_u64().unwrap() > 100 && told["handed_over"].as_u64().unwrap() > 10,
        "{told}"
    );
    assert_eq!(told["streams_destroyed"], 0);
}

#[test]
fn blocks_keep_what_kernels_wrote_while_streams_are_destroyed() {
    let (output, told) = run_with_kernels(&["--destroy-streams"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(told["sees_a_fault"], 1);
    assert!(told["streams_destroyed"].as_u64().unwrap() > 0, "{told}");
}

#[test]
fn out_of_memory_is_no_failure() {
    let (output, told) =
        run(&["--fill", "0.999", "--threads", "8"], &[("PHANTOM_MEMORY", "128MiB")]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(told["refused"].as_u64().unwrap() > 0, "{told}");
}

#[test]
fn a_block_that_is_written_over_is_corruption() {
    for (output, told) in [run(&["--overwrite"], &[]), run_with_kernels(&["--overwrite"])] {
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(told["wrong"].as_u64().unwrap() > 0, "{told}");
    }
}

#[test]
fn what_cannot_be_run_says_why() {
    let run = |arguments: &[&str]| {
        Command::new(folder().join("canaries")).args(arguments).output().unwrap()
    };
    assert_eq!(run(&[]).status.code(), Some(2));
    let output = run(&["--library", "/nowhere/libgruyere.so", "--driver", "/nowhere/libcuda.so.1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere/libcuda.so.1"));
}
