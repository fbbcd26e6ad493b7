//! Memcheck finds nothing in programs under preload: no use of memory that is not theirs, and no
//! definite leak. There are no suppressions. Needs valgrind; `cargo xtask test` runs it.
//!
//! Memory that is still reachable at the end is none: a library that is never unloaded keeps its
//! heap to the last instruction, on purpose. "Possibly lost" is what is reachable through the
//! middle of it only, as the buckets of Rust's hash maps are.

#[path = "common/preload.rs"]
mod preload;

use preload::{Run, Workshop};
use std::path::Path;
use std::sync::OnceLock;

fn workshop() -> &'static Workshop {
    static WORKSHOP: OnceLock<Workshop> = OnceLock::new();
    WORKSHOP.get_or_init(|| {
        let workshop = Workshop::new();
        workshop.program("crowd.c", "crowd", "-l:libcudart.so.12");
        workshop.program("start.c", "start", "-l:libcudart.so.12");
        workshop.program("wrong.c", "wrong", "-l:libcudart.so.12");
        workshop
    })
}

/// Runs a program under memcheck and under preload. Its children run without memcheck.
fn checked(program: &str, arguments: &[&str], conf: &str) -> Run {
    let path = workshop().path(program);
    let mut all = vec![
        "--quiet",
        "--leak-check=full",
        "--show-leak-kinds=definite",
        "--errors-for-leak-kinds=definite",
        "--error-exitcode=99",
        // Threads take turns, or one that waits for another may wait for long.
        "--fair-sched=yes",
        &path,
    ];
    all.extend(arguments);
    // A process has less address space under valgrind, and a leak check looks at all of it.
    let settings = [
        ("GRUYERE_CONF", conf),
        ("PHANTOM_WINDOW", "2GiB"),
        ("PHANTOM_MEMORY", "256MiB"),
        ("PHANTOM_ORACLE", "on"),
        ("PHANTOM_KERNEL_NS", "200000"),
        ("GRUYERE_LOG", "off"),
    ];
    workshop().command(Path::new("valgrind"), &all, &settings, true)
}

#[track_caller]
fn assert_clean(program: &str, arguments: &[&str]) {
    for conf in ["preload:manage", "preload:observe"] {
        let Run { success, status, stdout, stderr } = checked(program, arguments, conf);
        assert!(
            success && !stderr.contains("=="),
            "{conf} {program} {arguments:?}: {status}\n{stdout}{stderr}"
        );
    }
}

#[test]
fn memcheck_finds_nothing_in_a_small_program() {
    assert_clean("start", &["5"]);
}

#[test]
fn nor_where_much_is_left_over_at_the_end() {
    assert_clean("start", &["3"]);
}

#[test]
fn nor_where_the_device_is_reset() {
    assert_clean("start", &["7"]);
}

#[test]
fn nor_in_a_crowd() {
    assert_clean("crowd", &["3", "6", "900", "1"]);
}

/// It would find something: the same way finds a leak and a wrong access of the program's.
#[test]
fn it_does_find_what_a_program_does_wrong() {
    let run = checked("wrong", &[], "preload:manage");
    assert!(!run.success, "{}", run.stderr);
    for complaint in ["Invalid write of size 1", "are definitely lost"] {
        assert!(run.stderr.contains(complaint), "{complaint}: {}", run.stderr);
    }
}
