//! The examples in C and C++ build without a warning, with the stand-in in place of a toolkit, and
//! do what they claim.

#[path = "../../../tests/common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;
#[path = "../../../tests/common/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use phantom_library::phantom_owner;
use tempfile::TempDir;

/// The examples' programs, and their libraries.
struct Built {
    folder: TempDir,
}

/// The programs, if they can be built; else the calling test is skipped.
fn built() -> Option<&'static Built> {
    for tool in ["make", "c++"] {
        if Command::new(tool).arg("--version").output().is_err() {
            skip::lacks(tool);
            return None;
        }
    }
    static BUILT: OnceLock<Built> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let library = Command::new(env!("CARGO_BIN_EXE_gruyere"))
            .args(["run", "-q", "--", "sh", "-c", "printf %s \"$LD_PRELOAD\""])
            .env_remove("LD_PRELOAD")
            .env_remove("GRUYERE_LIBRARY")
            .output()
            .unwrap();
        let library = PathBuf::from(String::from_utf8(library.stdout).unwrap());
        for name in ["libcuda.so.1", "libcudart.so.12"] {
            std::os::unix::fs::symlink(phantom_library::library(), folder.path().join(name))
                .unwrap();
        }
        let made = Command::new("make")
            .arg("-C")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples"))
            .arg(format!("CUDART={}/libcudart.so.12", folder.path().display()))
            .arg(format!("GRUYERE={}", library.parent().unwrap().display()))
            .arg(format!("BUILD={}/build", folder.path().display()))
            // A make that runs the tests passes on its own settings.
            .env_remove("MAKEFLAGS")
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Built { folder }
    });
    Some(built)
}

impl Built {
    fn run(&self, words: &[&str], name: &str) -> Output {
        let program = self.folder.path().join("build").join(name);
        let mut command = match words.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        };
        for ours in ["LD_PRELOAD", "GRUYERE_CONF", "GRUYERE_LIBRARY"] {
            command.env_remove(ours);
        }
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("GRUYERE_LOG", "off");
        command.envs([phantom_owner::variable().unwrap()]);
        let mut output = command.output().unwrap();
        output.stderr = phantom_owner::without_its_line(&output.stderr).into_bytes();
        assert!(output.status.success(), "{name}: {output:?}");
        output
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_control_interface_in_c() {
    let Some(built) = built() else { return };
    let said = text(&built.run(&[], "control").stdout);
    for line in [
        "live  300 MiB",
        "the pool has 8 blocks of 128 MiB",
        "at the end             live    0 MiB, held    0 MiB",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn buffers_and_resources_in_cpp() {
    let Some(built) = built() else { return };
    let said = text(&built.run(&[], "buffers").stdout);
    for line in [
        "live 64 MiB",
        "not yet: 32 blocks",
        "1 PiB: out of device memory",
        "at the end: live 0 bytes",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn a_program_that_knows_nothing_is_served_or_watched() {
    let Some(built) = built() else { return };
    let run = env!("CARGO_BIN_EXE_gruyere");
    for (mode, called) in [("--manage", "managed"), ("--observe", "observed")] {
        let output = built.run(&[run, "run", mode, "--"], "plain");
        let (said, told) = (text(&output.stdout), text(&output.stderr));
        assert!(said.ends_with("done\n"), "{said}");
        assert!(told.contains(called), "{told}");
        // 1 table, 400 scratches, 100 grids; all freed. 288 MiB were live: the table and a grid.
        let row: Vec<&str> = told.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(row[..3], ["0", "288.00", "MiB"], "{told}");
        assert_eq!(row[8..10], ["501", "501"], "{told}");
        let driver_calls: u64 = row[10].parse().unwrap();
        assert_eq!(driver_calls == 0, mode == "--observe", "watching calls nobody: {told}");
    }
    assert!(
        text(&built.run(&[], "plain").stderr).is_empty(),
        "alone it is a program like any other"
    );
}
