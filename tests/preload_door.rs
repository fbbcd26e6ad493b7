//! The LD_PRELOAD door: small C programs (tests/preload) on the stand-in, with libgruyere.so put in
//! as users do.
//!
//! Each program checks its promises itself, and says "kept"; here it is compiled, linked with the
//! stand-in where a real one finds libcudart, and run.

#[path = "common/preload.rs"]
mod preload;

use gruyere::record::DeviceGauge;
use preload::{Run, Workshop};
use std::path::Path;
use std::sync::OnceLock;

fn workshop() -> &'static Workshop {
    static WORKSHOP: OnceLock<Workshop> = OnceLock::new();
    WORKSHOP.get_or_init(|| {
        let workshop = Workshop::new();
        workshop.program("calls.c", "calls", "-l:libcudart.so.12");
        workshop.program("life.c", "life", "-l:libcudart.so.12");
        workshop.program("loads.c", "loads", "");
        workshop.library("plugin.c", "libplugin.so", "-l:libcudart.so.12");
        workshop.library("plugin.c", "libdeep.so", "-l:libcudart.so.12");
        workshop.library("other_runtime.c", "libcudart.so.11", "-Wl,-soname,libcudart.so.11");
        workshop.library("plugin.c", "libolder.so", "-l:libcudart.so.11");
        workshop.library("nccl.c", "libnccl.so.2", "-Wl,-soname,libnccl.so.2");
        workshop.program("ranks.c", "ranks", "-l:libnccl.so.2 -l:libcudart.so.12");
        workshop
    })
}

/// Runs a promise of calls.c under preload with `conf`.
fn call(promise: &str, conf: &str) -> Run {
    workshop().preloaded("calls", &[promise], &[("GRUYERE_CONF", conf)])
}

fn scene(name: &str) -> Run {
    workshop().preloaded("life", &[name], &[("SCENE", name)])
}

/// A program that loads the driver and allocates nothing.
const NO_CALL: [&str; 3] = ["driver", "-", "-"];

#[test]
fn every_kind_of_malloc_and_free_is_served_and_none_reaches_the_runtime() {
    for conf in ["", "preload:manage", "share:off"] {
        call("served", conf).kept();
    }
    // There the heap's own spans are what the stand-in counts.
    for conf in ["backing:pool", "backing:fixed", "backing:passthrough"] {
        call("all_kinds", conf).kept();
    }
}

#[test]
fn observed_every_call_reaches_the_runtime_and_the_books_are_kept() {
    let run = call("passed_on", "preload:observe");
    run.kept();
    assert_eq!(run.stderr, "");
}

#[test]
fn observed_the_runtime_is_called_as_without_us_but_for_asking_the_device() {
    let log = |name: &str, preloaded: bool| {
        let path = workshop().folder.join(name);
        let settings =
            [("PHANTOM_CALL_LOG", path.to_str().unwrap()), ("GRUYERE_CONF", "preload:observe")];
        let run = if preloaded {
            workshop().preloaded("calls", &["passed_on"], &settings)
        } else {
            workshop().bare("calls", &["passed_on"], &settings)
        };
        run.kept();
        std::fs::read_to_string(path).unwrap()
    };
    let (with, without) = (log("with.log", true), log("without.log", false));
    let theirs: Vec<_> = with.lines().filter(|line| !line.contains("cudaGetDevice")).collect();
    let alone: Vec<_> = without.lines().filter(|line| !line.contains("cudaGetDevice")).collect();
    assert!(alone.len() > 700, "{without}");
    assert_eq!(theirs, alone);
}

#[test]
fn switched_off_every_call_reaches_the_runtime_and_there_is_no_record() {
    call("passed_on", "preload:off").kept();
}

#[test]
fn a_wrong_configuration_leaves_the_program_alone_and_is_told() {
    let run = call("passed_on", "preload:everything");
    run.kept();
    assert!(
        run.stderr.contains("preload:everything") && run.stderr.contains("auto|manage|observe|off")
    );
}

#[test]
fn requests_of_nothing_are_the_runtime_s() {
    for mode in ["manage", "observe"] {
        call("nothing", &format!("preload:{mode}")).kept();
    }
}

#[test]
fn what_is_freed_twice_or_inside_a_block_never_reaches_the_runtime() {
    let run = call("wrong_frees", "");
    run.kept();
    assert_eq!(run.stderr.matches("no live block starts there").count(), 4, "{}", run.stderr);
}

#[test]
fn pools_of_the_program_s_own_serve_it() {
    call("own_pools", "").kept();
}

#[test]
fn ours_are_never_part_of_a_graph() {
    let run = call("captures", "");
    run.kept();
    assert!(run.stderr.contains("capturing") && run.stderr.contains("free it outside the capture"));
}

#[test]
fn out_of_memory_is_the_runtime_s_error_and_its_last_one() {
    let settings = [("PHANTOM_MEMORY", "1GiB")];
    let run = workshop().preloaded("calls", &["out_of_memory"], &settings);
    run.kept();
    assert!(
        run.stderr.contains("CUDA out of memory. Tried to allocate 600.00 MiB"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_program_that_exits_with_a_failure_after_an_out_of_memory_leaves_its_record_for_post() {
    for (promise, conf, left) in [
        ("dies_of_it", "", 1),
        ("dies_of_it", "records_kept:0", 0),
        ("goes_on", "", 0),
        ("ends_well", "", 0),
        ("dies_of_it", "preload:observe", 1),
        ("goes_on", "preload:observe", 0),
        ("ends_well", "preload:observe", 0),
    ] {
        let records = workshop().folder.join(format!("records-{promise}-{conf}"));
        std::fs::create_dir(&records).unwrap();
        let settings = [
            ("PHANTOM_MEMORY", "1GiB"),
            ("GRUYERE_CONF", conf),
            ("GRUYERE_RECORD_DIR", records.to_str().unwrap()),
        ];
        let run = workshop().preloaded("calls", &[promise], &settings);
        assert!(run.stdout.contains("kept"), "{promise}: {}{}", run.stdout, run.stderr);
        let files: Vec<_> = std::fs::read_dir(&records).unwrap().flatten().collect();
        assert_eq!(files.len(), left, "{promise}, {conf}: {files:?}");
        assert_eq!(run.stderr.contains("`gruyere post "), left == 1, "{}", run.stderr);
        if let Some(file) = files.first() {
            let record = gruyere::record::Reader::open(&file.path()).unwrap();
            let uses = record.process().uses.unwrap();
            assert!(!uses.torch && !uses.python);
            // As it was at the refusal, though memory was freed since.
            let device = &record.device_snapshots()[0];
            assert_eq!((device.live, device.gauge(DeviceGauge::OutOfMemories)), (1 << 30, 1));
        }
    }
}

#[test]
fn idle_memory_counts_as_free() {
    for conf in ["", "backing:pool"] {
        call("memory_info", conf).kept();
    }
}

#[test]
fn a_thread_gets_its_context_and_blocks_of_other_contexts_are_not_served() {
    call("contexts", "").kept();
}

#[test]
fn a_reset_device_is_as_new() {
    for mode in ["manage", "observe"] {
        call("reset", &format!("preload:{mode}")).kept();
    }
}

#[test]
fn each_device_has_its_memory_and_a_stream_s_is_its_device_s() {
    workshop().preloaded("calls", &["devices"], &[("PHANTOM_DEVICES", "2")]).kept();
}

#[test]
fn a_device_that_may_reach_another_s_memory_does_before_it_has_any_of_its_own() {
    workshop().preloaded("calls", &["peers"], &[("PHANTOM_DEVICES", "2")]).kept();
}

#[test]
fn access_granted_on_a_default_pool_is_granted_to_what_is_served_in_its_place() {
    for promise in ["pool_access", "own_pool_access"] {
        workshop().preloaded("calls", &[promise], &[("PHANTOM_DEVICES", "2")]).kept();
    }
}

#[test]
fn per_thread_default_streams_are_served_and_observed() {
    for mode in ["manage", "observe"] {
        call("per_thread", &format!("preload:{mode}")).kept();
    }
}

#[test]
fn blocks_of_a_fixed_backing_are_exported_at_their_own_address_or_not_at_all() {
    let run = call("ipc_fixed", "backing:fixed");
    run.kept();
    assert!(run.stderr.contains("shares its span with others"), "{}", run.stderr);
}

#[test]
fn blocks_of_other_backings_are_refused_with_the_remedy() {
    for conf in ["", "backing:pool"] {
        let run = call("ipc_refused", conf);
        run.kept();
        assert!(run.stderr.contains("backing:fixed"), "{}", run.stderr);
    }
}

#[test]
fn a_forked_child_has_no_cuda_and_takes_nothing_from_its_parent() {
    scene("fork_after_use").kept();
}

#[test]
fn a_child_that_is_forked_before_the_first_call_is_served_itself() {
    scene("fork_before_use").kept();
}

#[test]
fn a_process_that_execs_is_served_anew() {
    scene("exec_itself").kept();
}

#[test]
fn threads_may_free_at_their_end_and_run_into_the_process_s() {
    for _ in 0..10 {
        scene("threads").kept();
    }
}

#[test]
fn static_constructors_and_destructors_may_allocate_and_free() {
    for conf in ["", "preload:observe", "preload:off"] {
        let settings = [("SCENE", "constructors"), ("GRUYERE_CONF", conf)];
        let run = workshop().preloaded("life", &["constructors"], &settings);
        run.kept();
        assert!(run.stdout.contains("freed"), "{}", run.stdout);
        assert_eq!(run.stderr, "");
    }
}

#[test]
fn a_library_that_brings_its_own_runtime_is_served() {
    let plugin = workshop().path("libplugin.so");
    workshop().preloaded("loads", &["local", &plugin, "-"], &[]).kept();
}

#[test]
fn a_deep_bound_library_is_not_seen_and_cannot_free_what_is_ours() {
    let (plugin, deep) = (workshop().path("libplugin.so"), workshop().path("libdeep.so"));
    workshop().preloaded("loads", &["deep", &plugin, &deep], &[]).kept();
}

#[test]
fn each_caller_gets_the_runtime_that_it_was_linked_with() {
    let (plugin, older) = (workshop().path("libplugin.so"), workshop().path("libolder.so"));
    for conf in ["preload:observe", "preload:off"] {
        let settings = [("GRUYERE_CONF", conf)];
        workshop().preloaded("loads", &["two", &plugin, &older], &settings).kept();
        workshop().preloaded("loads", &["two", &plugin, &older], &settings).kept();
    }
}

#[test]
fn a_program_in_which_no_call_was_seen_is_told_what_would_help() {
    let run = workshop().preloaded("loads", &NO_CALL, &[]);
    run.kept();
    assert!(
        run.stderr.contains("preload:driver") && run.stderr.lines().count() == 1,
        "{}",
        run.stderr
    );
    let driver = workshop().preloaded("loads", &NO_CALL, &[("GRUYERE_CONF", "preload:driver")]);
    assert!(driver.stderr.contains("libgruyere_driver.so"), "{}", driver.stderr);
}

#[test]
fn nothing_is_said_of_a_program_without_cuda_or_with_calls_or_when_off() {
    assert_eq!(scene("no_cuda").stderr, "");
    assert_eq!(scene("once").stderr, "");
    let off = workshop().preloaded("loads", &NO_CALL, &[("GRUYERE_CONF", "preload:off")]);
    assert_eq!(off.stderr, "");
    assert_eq!(workshop().bare("loads", &NO_CALL, &[]).stderr, "");
}

#[test]
fn linked_and_not_preloaded_the_door_opens_only_where_it_is_asked_to() {
    let linked = "-Wl,--no-as-needed -l:libgruyere.so -l:libcudart.so.12";
    workshop().program("calls.c", "linked", linked);
    workshop().bare("linked", &["passed_on"], &[]).kept();
    workshop().bare("linked", &["served"], &[("GRUYERE_CONF", "preload:manage")]).kept();
    // Behind the runtime no call comes here.
    workshop().program(
        "calls.c",
        "behind",
        "-Wl,--no-as-needed -l:libcudart.so.12 -l:libgruyere.so",
    );
    workshop().bare("behind", &["passed_on"], &[("GRUYERE_CONF", "preload:manage")]).kept();
}

#[test]
fn programs_without_cuda_run_as_ever() {
    assert!(Path::new("/bin/sh").exists());
    let run = workshop().command(Path::new("/bin/sh"), &["-c", "echo kept; exit 0"], &[], true);
    run.kept();
    assert_eq!(run.stderr, "");
}

/// Streams may not wait for each other any more, for this reason.
fn forbidden(call: &str) -> String {
    format!("only where the alternative is out of memory: the program calls {call}\n")
}

#[test]
fn a_host_function_forbids_waits_before_it_is_enqueued() {
    for (promise, call) in
        [("host_functions", "cudaLaunchHostFunc"), ("callbacks", "cudaStreamAddCallback")]
    {
        let run = workshop().preloaded("calls", &[promise], &[("GRUYERE_LOG", "info")]);
        run.kept();
        let (before, after) = run.stderr.split_once("first\n").expect("it ran");
        assert!(before.contains(&forbidden(call)), "{}", run.stderr);
        assert!(!after.contains("out of memory:"), "said twice: {}", run.stderr);
        // Nobody is served there, and nobody is told.
        for conf in ["preload:observe", "preload:off"] {
            let settings = [("GRUYERE_LOG", "info"), ("GRUYERE_CONF", conf)];
            let run = workshop().preloaded("calls", &[promise], &settings);
            run.kept();
            assert!(!run.stderr.contains(call), "{}", run.stderr);
        }
    }
}

#[test]
fn a_communicator_of_several_ranks_forbids_waits_before_nccl_makes_it() {
    for call in [
        "ncclCommInitRank",
        "ncclCommInitRankConfig",
        "ncclCommInitRankScalable",
        "ncclCommInitAll",
    ] {
        let make = |ranks: &str| {
            let run = workshop().preloaded("ranks", &[call, ranks], &[("GRUYERE_LOG", "info")]);
            run.kept();
            run.stderr
        };
        let stderr = make("8");
        let (before, _) = stderr.split_once("NCCL makes 8").expect("NCCL is called");
        assert!(before.contains(&forbidden(&format!("{call} for 8 ranks"))), "{stderr}");
        let stderr = make("1");
        assert!(stderr.contains("NCCL makes 1") && !stderr.contains("for 1 ranks"), "{stderr}");
    }
}
