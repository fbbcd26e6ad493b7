//! `gruyere bench` as a user runs it: output, files and exit status.

use std::path::Path;
use std::process::{Command, Output};

fn bench(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.arg("bench").args(args).current_dir(folder);
    command.env_remove("GRUYERE_CONF").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Two steps on two streams, with a weight that lives to the end.
const SMALL: &str =
    "a 1 4194304 0 0\nk 0 1\na 2 1000 0 0\nk 0 2\nf 2\nm step\na 3 12582912 0 7\nk 7 1\nr 1 7\nf 3\nm step\n";

fn folder_with(trace: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("small.trace"), trace).unwrap();
    folder
}

#[test]
fn a_trace_of_ones_own_gives_table_json_and_chart() {
    let folder = folder_with(SMALL);
    let output =
        bench(folder.path(), &["--trace", "small.trace", "--conf", "share:off", "--fit", "--timeline"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["small", "torch", "expandable", "gruyere", "gruyere share:off", "hold", "fit", "ns/op"] {
        assert!(table.contains(word), "{word} is missing in\n{table}");
    }
    assert_eq!(text(&output.stderr), "", "no progress bar where stderr is no terminal");
    let svg = std::fs::read_to_string(folder.path().join("bench.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    let json = std::fs::read_to_string(folder.path().join("bench.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["schema"].as_str(), json["version"].as_u64()), (Some("gruyere.bench"), Some(1)));
    let runs = json["traces"][0]["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    // torch: one 20 MiB segment for 4 MiB, 2 MiB for the small block, and 12 MiB on the other stream.
    assert_eq!(runs[0]["peak_reserved"].as_u64(), Some(34 << 20));
    assert_eq!(json["traces"][0]["peak_live"].as_u64(), Some(16 << 20));
    for run in runs {
        assert!(run["timeline"]["device_end_ns"].as_u64() > Some(0));
        assert!(run["fit_ratio"].as_f64() >= Some(1.0));
        assert_eq!(run["fault_count"].as_u64(), Some(0));
    }
    assert!(runs[2]["ns_per_operation"].is_f64() && runs[0]["ns_per_operation"].is_null());
}

#[test]
fn json_goes_to_stdout_on_request() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--trace", "small.trace", "--json", "--models-only"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let names: Vec<_> =
        json["traces"][0]["runs"].as_array().unwrap().iter().map(|run| &run["allocator"]).collect();
    assert_eq!(names, ["torch", "expandable"]);
}

#[test]
fn a_damaged_trace_is_refused_with_file_and_line() {
    let folder = folder_with("a 1 512 0 0\nf 1\nf 1\n");
    let output = bench(folder.path(), &["--trace", "small.trace"]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.contains("small.trace: line 3: id 1 was freed at line 2"), "{message}");
}

#[test]
fn a_bad_configuration_is_refused() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--trace", "small.trace", "--conf", "shrae:off"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("shrae"), "{}", text(&output.stderr));
}

#[test]
fn a_folder_that_cannot_be_made_is_said_before_the_work() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--trace", "small.trace", "--out", "small.trace/x"]);
    assert_ne!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("small.trace"), "{}", text(&output.stderr));
}

#[test]
fn the_bundled_traces_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["--list"]);
    assert_eq!(output.status.code(), Some(0));
    let list = text(&output.stdout);
    assert_eq!(list.lines().count(), 7);
    assert!(list.contains("llama7b_full") && list.contains("62.8 GiB"), "{list}");
}

#[test]
fn wrong_arguments_have_their_own_status() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(bench(folder.path(), &["--models-only", "--conf", "share:off"]).status.code(), Some(2));
}

#[test]
fn without_a_gpu_cuda_is_an_error_with_a_reason() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--device", "cuda", "--trace", "small.trace"]);
    // On a machine with a GPU it works; anywhere else it says why not.
    match output.status.code() {
        Some(0) => assert!(text(&output.stdout).contains("gruyere")),
        code => {
            assert_eq!(code, Some(1));
            assert!(text(&output.stderr).contains("--device cuda"), "{}", text(&output.stderr));
        }
    }
}
