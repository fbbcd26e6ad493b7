//! tests/gpu/probe on the stand-in: what it says of a driver is what that driver does, and its
//! prices can be read as the stand-in's.

#[path = "common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use gruyere_phantom::{Costs, Prices};
use serde_json::Value;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/probe");

fn cc(arguments: &[&str], sources: &[PathBuf], libraries: &[&str], out: &Path) {
    let mut command = Command::new("cc");
    command.args(arguments).args(sources).args(libraries).arg("-o").arg(out);
    let made = command.output().expect("cc runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// The probe, as its own comment says to build it; and a folder in which the stand-in has libcuda's
/// name.
fn built() -> &'static (PathBuf, tempfile::TempDir) {
    static BUILT: OnceLock<(PathBuf, tempfile::TempDir)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let sources = std::fs::read_dir(SOURCES).unwrap().map(|entry| entry.unwrap().path());
        let sources: Vec<_> =
            sources.filter(|path| path.extension().is_some_and(|ending| ending == "c")).collect();
        let probe = folder.path().join("probe");
        cc(&["-O2", "-Wall", "-Wextra", "-Werror"], &sources, &["-ldl"], &probe);
        std::os::unix::fs::symlink(phantom_library::library(), folder.path().join("libcuda.so.1"))
            .unwrap();
        (probe, folder)
    })
}

fn run(arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    let (probe, folder) = built();
    let mut command = Command::new(probe);
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("PHANTOM_QUIET", "1")
        .envs([phantom_library::phantom_owner::variable().unwrap()])
        .env_remove("LD_PRELOAD");
    command.envs(settings.iter().copied()).output().unwrap()
}

fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Each rule's answer. None is told twice.
fn rules(document: &Value) -> BTreeMap<String, String> {
    let text = |rule: &Value, key| rule[key].as_str().unwrap().to_owned();
    let all = document["rules"].as_array().unwrap();
    let rules: BTreeMap<_, _> =
        all.iter().map(|rule| (text(rule, "name"), text(rule, "answer"))).collect();
    assert_eq!(rules.len(), all.len(), "a rule is told twice");
    assert!(rules.values().all(|answer| ["true", "false", "unknown"].contains(&answer.as_str())));
    rules
}

#[track_caller]
fn assert_rules(rules: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
    for (name, answer) in expected {
        assert_eq!(rules.get(*name).map(String::as_str), Some(*answer), "{name}");
    }
}

#[test]
fn the_rules_of_the_stand_in_are_told() {
    let output = run(&[], &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let document = document(&output);
    assert_eq!(document["broken_cases"], serde_json::json!([]), "{text}");
    assert_eq!(document["facts"]["device"], "Phantom H100 (stand-in)");
    assert_eq!(document["facts"]["kernels_run"], 0);
    let rules = rules(&document);
    assert_rules(
        &rules,
        &[
            ("granularity.divides_2_mib", "true"),
            ("capture.global.capture_info_is_answered", "true"),
            ("capture.thread_local.survives_capture_info", "true"),
            ("capture.relaxed.stream_query_is_answered", "false"),
            ("capture.relaxed.survives_stream_query", "false"),
            ("beside_capture.survives_create_map_relaxed", "true"),
            ("beside_capture.survives_map_unmap_release_relaxed", "true"),
            ("beside_capture.ctx_record_event_is_permitted", "false"),
            ("beside_capture.survives_ctx_record_event", "false"),
            ("destroyed_stream.event_record_is_refused", "true"),
            ("two_reservations.map_is_accepted", "false"),
            ("map.middle_of_a_handle_is_accepted", "false"),
            ("map.over_a_mapping_is_accepted", "false"),
            ("map.second_mapping_of_a_handle_is_accepted", "true"),
            ("unmap.part_of_a_mapping_is_accepted", "false"),
            ("unmap.over_a_hole_is_accepted", "false"),
            ("release.while_mapped_is_accepted", "true"),
            ("access.after_unmap_is_refused", "true"),
            ("many.20000_handles_are_created", "true"),
            ("many.all_are_mapped_twice", "true"),
            ("address_space.its_end_is_out_of_memory", "true"),
            // No kernel runs here: nothing is claimed of what takes one.
            ("alias.kernels_see_writes_in_stream_order", "unknown"),
            ("alias.bulk_copies_see_writes_in_stream_order", "unknown"),
            ("alias.dependent_launches_see_writes", "unknown"),
            ("waits.unmap_does_not_wait_for_kernels", "unknown"),
            ("waits.unmap_does_not_wait_for_copies", "unknown"),
        ],
    );
}

#[test]
fn what_a_driver_lacks_is_unknown_and_what_does_not_fit_is_no_failure() {
    let output =
        run(&[], &[("PHANTOM_WITHOUT", "stream_ids,context_events"), ("PHANTOM_MEMORY", "3GiB")]);
    let rules = rules(&document(&output));
    assert_rules(
        &rules,
        &[
            ("capture.global.survives_capture_info", "true"),
            ("many.20000_handles_are_created", "unknown"),
        ],
    );
    assert_ne!(rules.get("capture.global.stream_id_is_answered").map(String::as_str), Some("true"));
}

/// A driver of the tests' own (test/NAME.c): the stand-in but for what that file does.
fn driver_called(name: &str) -> String {
    let (_, folder) = built();
    let library = folder.path().join(format!("lib{name}.so"));
    let stand_in =
        ["-L", folder.path().to_str().unwrap(), "-Wl,--no-as-needed", "-l:libcuda.so.1", "-ldl"];
    let flags = ["-shared", "-fPIC", "-O3", "-Wall", "-Wextra", "-Werror"];
    cc(
        &flags,
        &[Path::new(SOURCES).join("test").join(name).with_extension("c")],
        &stand_in,
        &library,
    );
    library.to_str().unwrap().to_owned()
}

/// Where kernels run, each rule that takes them is answered, and a device whose mappings do not
/// agree is found out.
#[test]
fn rules_that_take_kernels_are_answered_where_kernels_run() {
    let library = driver_called("running");
    let output = run(&["--library", &library], &[]);
    let document = document(&output);
    assert_eq!(
        document["broken_cases"],
        serde_json::json!([]),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(document["facts"]["kernels_run"], 1);
    let of_contents = |rules: &BTreeMap<String, String>| -> Vec<(String, String)> {
        let is_of = |name: &str| name.starts_with("alias.") || name.starts_with("contents.");
        rules
            .iter()
            .filter(|(name, _)| is_of(name))
            .map(|(name, answer)| (name.clone(), answer.clone()))
            .collect()
    };
    let told = of_contents(&rules(&document));
    assert_eq!(told.len(), 13);
    assert!(told.iter().all(|(_, answer)| answer == "true"), "{told:?}");
    let waits: BTreeMap<_, _> =
        rules(&document).into_iter().filter(|(name, _)| name.starts_with("waits.")).collect();
    assert_eq!(waits.len(), 36);
    for (name, answer) in &waits {
        let expected = if name.starts_with("waits.mem_free_") { "false" } else { "true" };
        assert_eq!(answer, expected, "{name}");
    }

    let stale = run(&["--library", &library, "--limit", "20"], &[("RUNNING_STALE", "1")]);
    let told: BTreeMap<_, _> = of_contents(&rules(&self::document(&stale))).into_iter().collect();
    // What goes through one name alone holds all the same.
    let by_one_name = [
        "contents.of_a_new_handle_are_zero",
        "contents.stay_when_mapped_again",
        "alias.unmapping_one_keeps_work_through_the_other",
    ];
    for (name, answer) in &told {
        if !by_one_name.contains(&name.as_str()) {
            assert_eq!(answer, "false", "{name}");
        }
    }
}

/// A driver that refuses, crashes and hangs: each is told for what it is, and the other cases go
/// on.
#[test]
fn refusals_crashes_and_hangs_are_answers() {
    let library = driver_called("refusing");
    let output = run(&["--limit", "2", "--library", &library], &[]);
    let document = document(&output);
    let rules = rules(&document);
    assert_rules(
        &rules,
        &[
            ("capture.global.stream_id_is_answered", "false"),
            ("capture.relaxed.relaxed_thread.stream_id_is_answered", "false"),
            ("capture.relaxed.survives_stream_id", "false"),
            ("capture.relaxed.survives_capture_info", "true"),
            ("destroyed_stream.stream_id_is_refused", "false"),
            ("destroyed_stream.capture_info_is_refused", "true"),
            ("handle_type.posix_is_exported", "false"),
            ("map.second_mapping_of_a_handle_is_accepted", "true"),
        ],
    );
    let detail = |name: &str| {
        let rule =
            document["rules"].as_array().unwrap().iter().find(|rule| rule["name"] == name).unwrap();
        rule["detail"].as_str().unwrap().to_owned()
    };
    assert!(detail("capture.global.stream_id_is_answered").contains("code 900"));
    assert!(detail("destroyed_stream.stream_id_is_refused").contains("signal 6"));
    assert_eq!(detail("handle_type.posix_is_exported"), "hung for 2 s");
    // A case that could not go on is no answer to anything, and the exit code says that there was
    // one.
    let broken: Vec<_> =
        document["broken_cases"].as_array().unwrap().iter().map(|case| &case["name"]).collect();
    assert_eq!(broken, ["reservations", "prices_mappings"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(!rules.contains_key("two_reservations.unmap_is_accepted"));
}

/// The names in `costs` are the fields of the stand-in's `Costs`: what the probe writes is a price
/// file as it is.
#[test]
fn prices_have_the_stand_ins_names_and_every_call_its_samples() {
    let document = document(&run(&[], &[]));
    let fields: BTreeSet<_> = Costs::NAMES.iter().map(|&name| name.to_owned()).collect();
    let told: BTreeSet<_> =
        document["prices"]["costs"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(told, fields);
    let prices = Prices::read("probe.json", &document.to_string()).unwrap();
    assert_eq!(prices.left_out, [""; 0]);
    assert_eq!(Some(prices.costs.create as f64), document["prices"]["costs"]["create"].as_f64());
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"] {
        let price = &document["prices"]["calls"][call];
        assert!(
            ["by_call", "by_mapping", "by_page"]
                .iter()
                .all(|part| price[part].as_f64().unwrap() >= 0.0),
            "{call}"
        );
        for sample in price["samples"].as_array().unwrap() {
            let of = |key| sample[key].as_f64().unwrap();
            assert!(
                0.0 < of("median") && of("median") <= of("p99") && of("p99") <= of("max"),
                "{sample}"
            );
            assert!(of("count") >= 5.0 && of("bytes") >= f64::from(2 << 20), "{sample}");
        }
    }
    // Both ways to vary: one mapping of many pages, and many mappings.
    let samples = document["prices"]["calls"]["cuMemSetAccess"]["samples"].as_array().unwrap();
    let shapes: BTreeSet<_> = samples
        .iter()
        .map(|it| (it["bytes"].as_u64().unwrap() >> 21, it["mappings"].as_u64().unwrap()))
        .collect();
    assert!(
        [(1, 1), (64, 1), (64, 64), (256, 256)].iter().all(|shape| shapes.contains(shape)),
        "{shapes:?}"
    );
}

#[test]
fn a_device_without_mappings_is_asked_the_rest() {
    let output = run(&[], &[("PHANTOM_WITHOUT", "vmm")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document = document(&output);
    assert_eq!(document["facts"]["virtual_memory_management"], 0);
    let rules = rules(&document);
    assert_rules(&rules, &[("capture.global.survives_capture_info", "true")]);
    assert!(
        !rules.keys().any(|name| name.starts_with("map.") || name.starts_with("alias.")),
        "{rules:?}"
    );
    assert!(document["prices"]["costs"]["alloc"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_machine_without_a_driver_or_a_device_is_told_so() {
    let output = run(&["--library", "/nowhere/libcuda.so.1"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no CUDA driver"));
    let output = run(&[], &[("PHANTOM_DEVICES", "0")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cuInit(0) answered 100"));
    assert_eq!(run(&["--only", "nothing"], &[]).status.code(), Some(2));
    assert_eq!(run(&["--limit", "0"], &[]).status.code(), Some(2));
}
