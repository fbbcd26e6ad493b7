//! `gruyere bench` as a user runs it: output, files and exit status.

#[path = "../../../tests/common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;

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

/// Two steps on two streams, with a weight live to the end.
const SMALL: &str = "a 1 4194304 0 0\nk 0 1\na 2 1000 0 0\nk 0 2\nf 2\nm step\na 3 12582912 0 7\nk \
                     7 1\nr 1 7\nf 3\nm step\n";

fn folder_with(trace: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("small.trace"), trace).unwrap();
    folder
}

#[test]
fn a_trace_of_ones_own_gives_table_json_and_chart() {
    let folder = folder_with(SMALL);
    let output = bench(
        folder.path(),
        &["--trace", "small.trace", "--conf", "share:off", "--fit", "--timeline"],
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["small", "torch,", "expandable", "Gruyère", "share:off", "live", "device that"] {
        assert!(table.contains(word), "{word} is missing in\n{table}");
    }
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let progress = text(&output.stderr);
    assert_eq!(progress.lines().count(), 6, "a line a run where stderr is no terminal: {progress}");
    assert!(progress.lines().all(|line| line.contains("of 6 done; small · ")), "{progress}");
    assert!(table.starts_with("Gruyère holds the least.\n"), "{table}");
    assert!(table.contains("\nNo faults; every run completed.\n"), "{table}");
    let last = table.lines().last().unwrap();
    assert_eq!(last, "written: ./bench.json and ./bench.svg; all figures: --full");
    let svg = std::fs::read_to_string(folder.path().join("bench.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    let json = std::fs::read_to_string(folder.path().join("bench.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (json["schema"].as_str(), json["version"].as_u64()),
        (Some("gruyere.bench"), Some(2))
    );
    let runs = json["traces"][0]["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    // torch: one 20 MiB segment for 4 MiB, 2 MiB for the small block, and 12 MiB on the other
    // stream.
    assert_eq!(runs[0]["peak_reserved"].as_u64(), Some(34 << 20));
    assert_eq!(json["traces"][0]["peak_live"].as_u64(), Some(16 << 20));
    for run in runs {
        assert!(run["timeline"]["device_end_ns"].as_u64() > Some(0));
        assert!(run["fit_ratio"].as_f64() >= Some(1.0));
        assert_eq!(run["fault_count"].as_u64(), Some(0));
    }
    assert!(runs[2]["ns_per_operation"].is_f64() && runs[0]["ns_per_operation"].is_null());
}

/// Memory that a stream has freed while its kernels still run: immediately usable by the other
/// stream.
const HANDED_ON: &str = "m ranks 2\na 1 134217728 0 0\nk 0 100\nf 1\na 2 134217728 0 7\nk 7 1\n";

#[test]
fn what_is_held_is_measured_on_each_clock_and_the_first_is_that_of_all_figures() {
    let folder = folder_with(HANDED_ON);
    let held = |clock: &str| -> Vec<u64> {
        let output = bench(folder.path(), &["--trace", "small.trace", "--json", "--clock", clock]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let run = &json["traces"][0]["runs"][2];
        let clocks = run["clocks"].as_array().unwrap();
        let names: Vec<_> = clocks.iter().map(|lag| lag["clock"].as_str().unwrap()).collect();
        assert_eq!(names.join(","), clock);
        let held: Vec<_> = clocks.iter().map(|lag| lag["peak_reserved"].as_u64()).collect();
        assert_eq!(run["peak_reserved"].as_u64(), held[0]);
        held.into_iter().flatten().collect()
    };
    let both = held("0,100us");
    assert!(both[0] < 144 << 20 && both[1] >= 256 << 20, "{both:?}");
    assert_eq!(held("100us"), both[1..]);
    let output = bench(folder.path(), &["--trace", "small.trace", "--clock", "5us,0"]);
    let table = text(&output.stdout);
    assert!(table.contains("; kernels take 5 us\n"), "{table}");
    assert!(table.contains("; a device that is done at once\n"), "{table}");
    let wrong = bench(folder.path(), &["--clock", "20"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("20us"), "{}", text(&wrong.stderr));
}

#[test]
fn every_figure_is_in_the_full_table() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--trace", "small.trace", "--full", "--conf", "share:off"]);
    let table = text(&output.stdout);
    for word in ["small", "torch", "expandable", "gruyere share:off", "hold ratio", "ns/op"] {
        assert!(table.contains(word), "{word} is missing in\n{table}");
    }
    assert!(table.starts_with("Gruyère holds the least"), "{table}");
}

/// README's table comes from bench.json by `cargo xtask figures`, and so does this one.
#[test]
fn the_table_has_the_cells_of_readmes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let cells = |row: &str| -> Vec<String> {
        let row = row.replace(['|', '*'], " ");
        row.split_whitespace().map(str::to_owned).collect()
    };
    let row = readme.lines().find(|line| line.starts_with("| fsdp |")).expect("a row");
    let folder = tempfile::tempdir().unwrap();
    let trace = root.join("traces/fsdp.trace.zst");
    let output = bench(folder.path(), &["--trace", trace.to_str().unwrap()]);
    let table = text(&output.stdout);
    let ours = table.lines().find(|line| line.trim_start().starts_with("fsdp ")).expect("a row");
    assert_eq!(cells(ours), cells(row), "{table}");
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
fn a_trace_that_ends_in_the_middle_is_replayed_and_said_to_be_cut() {
    let folder = folder_with(SMALL);
    let (first, last) = SMALL.split_at(SMALL.find("a 3").unwrap());
    let pieces = [first, last].map(|text| zstd::bulk::compress(text.as_bytes(), 3).unwrap());
    let whole = pieces.concat();
    let replayed = |bytes: &[u8]| {
        std::fs::write(folder.path().join("cut.trace.zst"), bytes).unwrap();
        let output = bench(folder.path(), &["--trace", "cut.trace.zst", "--models-only"]);
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = replayed(&whole[..pieces[0].len() + 12]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("cut.trace.zst: ends in the middle"), "{said}");
    assert!(said.contains("3 operations"), "{said}");
    let (code, said) = replayed(&whole);
    assert!(code == Some(0) && !said.contains("ends in the middle"), "{said}");
    // Nothing is left of its only piece.
    let (code, said) = replayed(&pieces[0][..pieces[0].len() - 4]);
    assert!(code == Some(1) && said.contains("damaged or cut short"), "{said}");
}

#[test]
fn a_bad_configuration_is_refused_before_the_replays() {
    let folder = folder_with(SMALL);
    for conf in ["shrae:off", "limit:1G"] {
        let output = bench(folder.path(), &["--trace", "small.trace", "--conf", conf]);
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains(conf) && !said.contains("done; small"), "{said}");
    }
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
    // The seven large ones first.
    let small = list.lines().skip(7).collect::<Vec<_>>().join("\n");
    assert!(list.contains("llama7b_full") && list.contains("62.8 GiB"), "{list}");
    assert!(small.lines().count() >= 24 && !small.contains("llama7b_full"), "{list}");
    assert!(small.contains("resnet50"), "{list}");
}

#[test]
fn wrong_arguments_have_their_own_status() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        bench(folder.path(), &["--models-only", "--conf", "share:off"]).status.code(),
        Some(2)
    );
}

#[test]
fn without_a_gpu_cuda_is_an_error_with_a_reason() {
    let folder = folder_with(SMALL);
    let output = bench(folder.path(), &["--device", "cuda", "--trace", "small.trace"]);
    // It works on a machine with a GPU; elsewhere it prints the reason.
    match output.status.code() {
        Some(0) => assert!(text(&output.stdout).contains("gruyere")),
        code => {
            assert_eq!(code, Some(1));
            assert!(text(&output.stderr).contains("--device cuda"), "{}", text(&output.stderr));
        }
    }
}

/// Sixteen mappings of 2 MiB or one of 32: the price of a call determines when the device is done,
/// and nothing else differs.
#[test]
fn prices_move_device_ends_and_nothing_else() {
    let folder = folder_with(SMALL);
    let run = |more: &[&str]| {
        let args =
            [&["--trace", "small.trace", "--json", "--models-only", "--timeline"], more].concat();
        let output = bench(folder.path(), &args);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        (serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap(), text(&output.stderr))
    };
    let expandable = |report: &serde_json::Value| report["traces"][0]["runs"][1].clone();
    let (unsaid, _) = run(&[]);
    let (by_call, _) = run(&["--prices", "by-call"]);
    let (dear, _) = run(&["--prices", "by-mapping-and-page"]);
    assert_eq!(
        (&unsaid["measured"]["prices"], &dear["measured"]["prices"]),
        (&"h200".into(), &"by-mapping-and-page".into())
    );
    let (measured, _) = run(&["--prices", "h200"]);
    assert_eq!(expandable(&unsaid), expandable(&measured));
    let end = |report: &serde_json::Value| {
        expandable(report)["timeline"]["device_end_ns"].as_u64().unwrap()
    };
    // A segment of 20 MiB for each of two streams, one of 2 MiB: each is created, mapped and made
    // accessible. 193 us replace 29.
    assert!(end(&dear) > end(&by_call) + 3 * 164_000, "{} {}", end(&dear), end(&by_call));
    for figure in ["hold_ratio", "area_ratio", "driver_calls", "peak_reserved"] {
        assert_eq!(expandable(&dear)[figure], expandable(&by_call)[figure], "{figure}");
    }
    // A user's own file; the command reports missing prices.
    std::fs::write(
        folder.path().join("mine.json"),
        r#"{"costs": {"create": {"ns": 1029000, "source": "me"}}}"#,
    )
    .unwrap();
    let (mine, said) = run(&["--prices", "mine.json"]);
    assert_eq!(end(&mine), end(&by_call) + 3_000_000);
    assert!(
        said.contains("missing, so by-call's are used: query") && !said.contains(" create,"),
        "{said}"
    );
}

#[test]
fn prices_that_cannot_be_read_are_refused_before_the_work() {
    let folder = folder_with(SMALL);
    std::fs::write(folder.path().join("bad.json"), r#"{"costs": {"creat": 1}}"#).unwrap();
    for (prices, said) in
        [("bad.json", "\"creat\" is no call's price"), ("by-cal", "h200 or a JSON file")]
    {
        let output = bench(folder.path(), &["--trace", "small.trace", "--prices", prices]);
        assert_eq!(output.status.code(), Some(1), "{prices}");
        let message = text(&output.stderr);
        assert!(message.contains(prices) && message.contains(said), "{message}");
    }
    assert_eq!(
        bench(folder.path(), &["--prices", "by-call", "--device", "cuda"]).status.code(),
        Some(2)
    );
}

/// Output of `--device cuda` if libcuda is the stand-in.
#[test]
fn on_a_device_each_kind_of_driver_call_is_timed_and_so_is_the_whole() {
    let folder = folder_with(SMALL);
    std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
        .unwrap();
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
        command.args(["bench", "--device", "cuda", "--trace", "small.trace"]).args(more);
        command.current_dir(folder.path()).env_remove("GRUYERE_CONF").env_remove("LD_PRELOAD");
        let output = command
            .env("LD_LIBRARY_PATH", folder.path())
            .env("PHANTOM_QUIET", "1")
            .envs([phantom_library::phantom_owner::variable().unwrap()])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let report: serde_json::Value = serde_json::from_str(&run(&["--json"])).unwrap();
    let run_of = &report["traces"][0]["runs"][0];
    let times = run_of["driver_call_times"].as_array().unwrap();
    let figure = |time: &serde_json::Value, name: &str| time[name].as_u64().unwrap();
    let (mut calls, mut total) = (0, 0);
    for time in times {
        assert!(figure(time, "count") > 0, "{time}");
        let [median, high, most, sum] =
            ["p50_nanoseconds", "p99_nanoseconds", "max_nanoseconds", "total_nanoseconds"]
                .map(|name| figure(time, name));
        assert!(0 < most && median <= high && high <= most && most <= sum, "{time}");
        (calls, total) = (calls + figure(time, "count"), total + sum);
    }
    let named = |name: &str| times.iter().any(|time| time["call"] == name);
    for call in [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamGetCaptureInfo",
    ] {
        assert!(named(call), "{call} is missing in {times:?}");
    }
    assert_eq!(run_of["driver_calls"].as_u64(), Some(calls));
    assert!(run_of["replay_ns"].as_u64() >= Some(total), "{run_of}");
    let page = run(&[]);
    for word in ["the replay took", "in driver calls", "MEDIAN", "99%", "MAX", "cuMemCreate"] {
        assert!(page.contains(word), "{word} is missing in\n{page}");
    }
}
