//! `preload:driver`: programs that link no CUDA, as those with a statically linked runtime, and
//! what else gets at the driver, on the stand-in with libgruyere_driver.so before libgruyere.so.
//!
//! Each program (tests/preload/driver) checks its promises itself, and says "kept".

#[path = "common/preload.rs"]
mod preload;
#[path = "common/skip.rs"]
mod skip;

use preload::{Run, Workshop, build};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

const LIBCUDA: &str = "-l:libcuda.so.1";

/// The ways to the driver: how work.c is compiled for each.
const WAYS: &[(&str, &str)] = &[
    ("static", "-DSTATIC_RUNTIME"),
    ("per_thread", "-DSTATIC_RUNTIME -DGET_FLAGS=2"),
    ("cuda13", "-DSTATIC_RUNTIME -DGET_VERSION=13000 -DGET_FLAGS=1"),
    ("dlsym", "-DBY_DLSYM"),
    ("linked", LIBCUDA),
];

fn workshop() -> &'static Workshop {
    static WORKSHOP: OnceLock<Workshop> = OnceLock::new();
    WORKSHOP.get_or_init(|| {
        let workshop = Workshop::new();
        let driver = build("gruyere-preload", "libgruyere_driver.so");
        std::os::unix::fs::symlink(driver, workshop.path("libgruyere_driver.so")).unwrap();
        for (name, flags) in WAYS {
            workshop.program("driver/work.c", name, flags);
        }
        workshop.program("driver/edges.c", "edges", "");
        workshop.library("driver/runtime.c", "libruntime.so", "");
        workshop.program("driver/on_runtime.c", "on_runtime", "-l:libruntime.so");
        workshop.library("driver/lookups_library.c", "liblookups.so", "-DAT_THE_EDGES");
        let plugin = format!("-Wl,--no-as-needed {LIBCUDA}");
        workshop.library("driver/lookups_library.c", "libplugin.so", &plugin);
        workshop.program("driver/lookups.c", "lookups", "-l:liblookups.so");
        workshop.library("driver/wrapper.c", "libwrapper.so", "");
        workshop.program("driver/fuzz.c", "fuzz", "");
        workshop.program("driver/devices.c", "devices", "");
        workshop.program("driver/later.c", "later", "");
        for table in 0..5 {
            let flags = format!("-DTABLE={table}");
            workshop.library("driver/other_gruyere.c", &format!("libother{table}.so"), &flags);
        }
        workshop
    })
}

/// Runs a program with libraries of the workshop preloaded.
fn preloaded(
    libraries: &[&str],
    program: &str,
    arguments: &[&str],
    settings: &[(&str, &str)],
) -> Run {
    let list: Vec<_> = libraries.iter().map(|name| workshop().path(name)).collect();
    let list = list.join(" ");
    let settings: Vec<_> =
        settings.iter().copied().chain([("LD_PRELOAD", list.as_str())]).collect();
    workshop().bare(program, arguments, &settings)
}

const BOTH: &[&str] = &["libgruyere_driver.so", "libgruyere.so"];

fn with_conf(conf: &str, program: &str, arguments: &[&str]) -> Run {
    preloaded(BOTH, program, arguments, &[("GRUYERE_CONF", conf)])
}

/// How often each function of the driver was called, by the stand-in's books.
fn calls(
    name: &str,
    libraries: &[&str],
    conf: &str,
    program: &str,
    arguments: &[&str],
) -> BTreeMap<String, u64> {
    let books = workshop().path(name);
    preloaded(libraries, program, arguments, &[("GRUYERE_CONF", conf), ("PHANTOM_BOOKS", &books)])
        .kept();
    let text = std::fs::read_to_string(books).unwrap();
    let books: serde_json::Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(books["calls"].clone()).unwrap()
}

#[test]
fn without_us_the_programs_keep_their_promises() {
    for (way, _) in WAYS {
        workshop().bare(way, &["alone", "threads"], &[]).kept();
    }
}

#[test]
fn every_way_to_the_driver_is_served() {
    for (way, _) in WAYS {
        for conf in
            ["preload:driver", "preload:manage+driver,backing:pool", "preload:driver,debug:poison"]
        {
            with_conf(conf, way, &["managed", "threads"]).kept();
        }
    }
}

#[test]
fn what_is_served_never_reaches_the_driver() {
    let alone = calls("alone.json", &[], "", "static", &["alone"]);
    let served = calls("served.json", BOTH, "preload:driver", "static", &["managed"]);
    let count = |calls: &BTreeMap<String, u64>, name: &str| calls.get(name).copied().unwrap_or(0);
    // What reaches it: sizes and places that it refuses, memory of another context, of a capture,
    // and of the program's own pool; twice where the heap had to give memory back for it.
    for (function, least, most) in [
        ("cuMemAlloc_v2", 100, 5),
        ("cuMemFree_v2", 100, 3),
        ("cuMemAllocAsync", 90, 1),
        ("cuMemFreeAsync", 60, 3),
        ("cuMemAllocFromPoolAsync", 2, 3),
    ] {
        assert!(count(&alone, function) >= least, "{function}: {alone:?}");
        assert!(count(&served, function) <= most, "{function}: {served:?}");
    }
}

#[test]
fn every_way_to_the_driver_is_observed() {
    for (way, _) in WAYS {
        let run = with_conf("preload:observe+driver", way, &["observed", "threads"]);
        run.kept();
    }
}

#[test]
fn observed_the_driver_is_called_as_without_us_but_for_asking_the_device() {
    for (way, _) in WAYS {
        let log = |name: &str, libraries: &[&str], role: &str| {
            let log = workshop().path(&format!("{way}.{name}.log"));
            let settings = [("GRUYERE_CONF", "preload:observe+driver"), ("PHANTOM_CALL_LOG", &log)];
            preloaded(libraries, way, &[role], &settings).kept();
            std::fs::read_to_string(log).unwrap()
        };
        let (alone, observed) = (log("alone", &[], "alone"), log("observed", BOTH, "observed"));
        let theirs: Vec<_> =
            observed.lines().filter(|line| !line.starts_with("cuCtxGetDevice")).collect();
        let alone: Vec<_> = alone.lines().collect();
        assert!(alone.len() > 400, "{alone:?}");
        assert_eq!(theirs, alone, "{way}");
    }
}

#[test]
fn each_device_has_its_memory_wherever_it_is_asked_for_and_freed() {
    let settings =
        [("GRUYERE_CONF", "preload:driver"), ("PHANTOM_DEVICES", "2"), ("PHANTOM_ORACLE", "on")];
    let run = preloaded(BOTH, "devices", &[], &settings);
    run.kept();
    assert_eq!(run.stderr, "");
}

#[test]
fn without_the_word_driver_or_with_the_door_off_nothing_is_seen() {
    for conf in ["", "preload:manage", "preload:observe", "preload:off"] {
        for (way, _) in WAYS {
            with_conf(conf, way, &["alone", "threads"]).kept();
        }
    }
}

#[test]
fn alone_the_library_does_nothing_and_says_so_once() {
    let run = preloaded(&["libgruyere_driver.so"], "static", &["alone", "threads"], &[]);
    run.kept();
    assert_eq!(run.stderr.matches("without libgruyere.so").count(), 1, "{}", run.stderr);
    assert!(
        run.stderr.contains("LD_PRELOAD=\"libgruyere_driver.so libgruyere.so\""),
        "{}",
        run.stderr
    );
}

#[test]
fn a_call_of_the_runtime_is_counted_once_though_it_calls_the_driver() {
    for conf in ["preload:observe+driver", "preload:manage+driver"] {
        with_conf(conf, "on_runtime", &[]).kept();
    }
}

#[test]
fn a_process_may_allocate_before_main_and_after_it_fork_and_execute_itself() {
    for conf in ["preload:manage+driver", "preload:observe+driver", "preload:off"] {
        let run = with_conf(conf, "edges", &[]);
        run.kept();
        assert!(run.stdout.contains("freed"), "{conf}: {}{}", run.stdout, run.stderr);
    }
    workshop().bare("edges", &[], &[]).kept();
}

/// What lookups.c finds, a line a lookup.
fn lookups(libraries: &[&str], conf: &str) -> Vec<String> {
    let plugin = workshop().path("libplugin.so");
    let run = preloaded(libraries, "lookups", &[&plugin], &[("GRUYERE_CONF", conf)]);
    run.kept();
    run.stdout.lines().map(str::to_owned).collect()
}

/// The functions of lookups.c that are stood in for.
const REPLACED: &[&str] = &[
    "'cuMemAlloc_v2'",
    "'cuMemFree_v2'",
    "'cuMemAllocAsync_ptsz'",
    "'cuStreamEndCapture'",
    "'cuGetProcAddress'",
    "'cuGetProcAddress_v2'",
];

#[test]
fn lookups_find_what_they_would_find_without_us_where_the_door_is_off() {
    let alone = lookups(&[], "");
    assert!(
        alone.len() > 300
            && alone
                .iter()
                .any(|line| line.contains("plugin RTLD_DEFAULT 'cuMemAlloc_v2': libcuda.so.1"))
    );
    assert_eq!(lookups(BOTH, "preload:off"), alone);
    assert_eq!(lookups(BOTH, "preload:manage"), alone);
    assert_eq!(lookups(&["libgruyere_driver.so"], ""), alone);
}

#[test]
fn lookups_by_handle_and_by_default_find_ours_for_the_functions_that_are_served_and_nothing_else_changes()
 {
    let alone = lookups(&[], "");
    let open = lookups(BOTH, "preload:driver");
    assert_eq!(alone.len(), open.len());
    let mut replaced = 0;
    for (before, after) in alone.iter().zip(&open) {
        // RTLD_NEXT is how a library behind us asks for the driver: it must not lead back.
        let is_served = REPLACED.iter().any(|name| before.contains(name))
            && before.contains(": libcuda.so.1")
            && !before.contains("RTLD_NEXT");
        if is_served {
            let place = before.split(": ").next().unwrap();
            let file =
                if before.contains("GetProc") { "libgruyere_driver.so" } else { "libgruyere.so" };
            assert_eq!(*after, format!("{place}: {file} inside"));
            replaced += 1;
        } else {
            assert_eq!(after, before);
        }
    }
    assert_eq!(
        replaced,
        2 * REPLACED.len(),
        "by libcuda's handle, and by default from a library that links it"
    );
}

#[test]
fn a_library_behind_us_that_stands_in_for_dlsym_too_is_still_asked() {
    let alone = lookups(&["libwrapper.so"], "");
    let open =
        lookups(&["libgruyere_driver.so", "libgruyere.so", "libwrapper.so"], "preload:driver");
    for (before, after) in alone.iter().zip(&open) {
        if !REPLACED.iter().any(|name| before.contains(name)) {
            assert_eq!(after, before);
        }
    }
    for libraries in [
        ["libgruyere_driver.so", "libgruyere.so", "libwrapper.so"],
        ["libgruyere_driver.so", "libwrapper.so", "libgruyere.so"],
    ] {
        let settings = [("GRUYERE_CONF", "preload:driver")];
        let run = preloaded(&libraries, "static", &["managed", "threads"], &settings);
        run.kept();
        assert!(run.stderr.contains("wrapped some"), "{}", run.stderr);
    }
}

#[test]
fn a_library_before_us_that_goes_past_us_leaves_the_program_to_the_driver() {
    let libraries = ["libwrapper.so", "libgruyere_driver.so", "libgruyere.so"];
    let run = preloaded(
        &libraries,
        "static",
        &["alone", "threads"],
        &[("GRUYERE_CONF", "preload:driver")],
    );
    run.kept();
    assert!(run.stderr.contains("Gruyère saw no allocation"), "{}", run.stderr);
    assert!(run.stderr.contains("libgruyere_driver.so is preloaded"), "{}", run.stderr);
}

#[test]
fn a_program_whose_calls_were_not_seen_is_told_whether_the_drivers_library_is_preloaded() {
    let settings = [("GRUYERE_CONF", "preload:driver")];
    let run = preloaded(&["libgruyere.so"], "static", &["alone", "threads"], &settings);
    run.kept();
    assert!(run.stderr.contains("libgruyere_driver.so is not preloaded"), "{}", run.stderr);
}

#[test]
fn names_by_chance_are_answered_as_glibc_answers_them() {
    for conf in ["preload:off", "preload:manage"] {
        with_conf(conf, "fuzz", &[]).kept();
    }
    preloaded(&["libgruyere_driver.so"], "fuzz", &[], &[]).kept();
}

#[test]
fn a_table_that_is_not_understood_is_left_alone() {
    for table in 0..5 {
        let other = format!("libother{table}.so");
        let run = preloaded(&["libgruyere_driver.so", &other], "static", &["alone"], &[]);
        run.kept();
        // The last is of this version, and wants nothing.
        let complaints = run.stderr.matches("of different versions").count();
        assert_eq!(complaints, usize::from(table != 4), "{table}: {}", run.stderr);
    }
}

#[test]
fn memcheck_finds_nothing_of_ours() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip::lacks("valgrind");
    }
    // A process has less address space under valgrind.
    let settings = [
        ("GRUYERE_CONF", "preload:driver"),
        ("GRUYERE_LOG", "off"),
        ("PHANTOM_WINDOW", "4GiB"),
        ("PHANTOM_MEMORY", "512MiB"),
        ("LD_PRELOAD", &format!("{} {}", workshop().path(BOTH[0]), workshop().path(BOTH[1]))),
    ];
    let path = workshop().path("static");
    let mut arguments =
        vec!["--quiet", "--error-exitcode=99", "--fair-sched=yes", "--leak-check=full"];
    arguments.extend(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    if !cfg!(debug_assertions) {
        // Where both outcomes are the same, the optimiser lets a branch hang on bytes that no value
        // has.
        arguments.push("--undef-value-errors=no");
    }
    arguments.extend([path.as_str(), "managed"]);
    let run = workshop().command(Path::new("valgrind"), &arguments, &settings, false);
    run.kept();
    assert!(!run.stderr.contains("=="), "{}", run.stderr);
}

#[test]
fn what_the_host_may_hold_up_forbids_waits_when_the_driver_is_asked_for_it() {
    let said = |call: &str| {
        let settings = [("GRUYERE_CONF", "preload:manage+driver"), ("GRUYERE_LOG", "info")];
        let run = preloaded(BOTH, "later", &[call], &settings);
        run.kept();
        run.stderr.contains(&format!("out of memory: the program calls {call}\n"))
    };
    for call in [
        "cuLaunchHostFunc",
        "cuLaunchHostFunc_v2",
        "cuStreamAddCallback",
        "cuStreamWaitValue32",
        "cuStreamWaitValue32_v2",
        "cuStreamWaitValue64",
        "cuStreamWaitValue64_v2",
        "cuStreamBatchMemOp",
        "cuStreamBatchMemOp_v2",
        "cuGraphAddHostNode",
        "cuGraphAddBatchMemOpNode",
    ] {
        assert!(said(call), "{call}");
    }
    assert!(!said("cuStreamWriteValue32"), "a write waits for nothing");
}
