//! `gruyere doctor`, and machines for it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::phantom_library::phantom_owner;

/// The command, with `libcuda` (if any) as the system's libcuda, and records of its own.
pub fn command(folder: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    for name in
        ["GRUYERE_CONF", "GRUYERE_ENABLE", "GRUYERE_LIBRARY", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES"]
    {
        command.env_remove(name);
    }
    let records = folder.join("records");
    std::fs::create_dir_all(&records).unwrap();
    command.arg("doctor").args(arguments).arg("--directory").arg(records);
    command.env("LD_LIBRARY_PATH", folder);
    command.envs([phantom_owner::variable().unwrap()]).envs(settings.iter().copied());
    command
}

/// Runs the command.
pub fn doctor(folder: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    command(folder, arguments, settings).output().expect("the command runs")
}

/// The findings in its output.
pub fn findings(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// The findings of an area, as `level: text`.
pub fn of(value: &Value, area: &str) -> Vec<String> {
    let all = value["findings"].as_array().expect("findings");
    let word = |finding: &Value, key: &str| finding[key].as_str().unwrap_or("").to_owned();
    all.iter()
        .filter(|finding| finding["area"] == area)
        .map(|finding| format!("{}: {}", word(finding, "level"), word(finding, "text")))
        .collect()
}

/// A libcuda with this cuInit.
pub fn libcuda(folder: &Path, init: &str) {
    let text =
        format!("#include <unistd.h>\nint cuInit(unsigned flags) {{ (void)flags; {init} }}\n");
    library(&text, &folder.join("libcuda.so.1"));
}

/// Compiles a library from C text.
pub fn library(text: &str, file: &Path) {
    let source = file.with_extension("c");
    std::fs::write(&source, text).unwrap();
    cc(&source, file, &[]);
}

/// Compiles a library from a C file.
pub fn cc(source: &Path, library: &Path, more: &[&str]) {
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O3", "-o"]).args([library, source]).args(more);
    let built = command.output().expect("cc runs (Debian: apt install build-essential)");
    assert!(built.status.success(), "{built:?}");
}
