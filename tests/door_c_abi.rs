//! What the C functions promise a caller that is not torch. One heap a process, so one test after
//! the other.

mod common;

use common::{GIB, MIB};
use gruyere::door::control::*;
use gruyere::door::torch::*;
use gruyere::door::{current, install};
use gruyere_phantom::{CallKind, Caller, Config as GpuConfig, Gpu, StreamKind, as_program};
use gruyere_phantom_driver::PhantomDriver;
use std::ffi::{CString, c_void};
use std::os::unix::fs::PermissionsExt as _;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A fresh heap of 1 GiB in the place of the process's.
fn fresh(conf: &str) -> (MutexGuard<'static, ()>, Arc<Gpu>) {
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let gpu = Arc::new(Gpu::new(GpuConfig::new(GIB)));
    install(Arc::new(PhantomDriver::new(gpu.clone())), conf).unwrap();
    (turn, gpu)
}

fn malloc(size: isize) -> *mut c_void {
    gruyere_malloc(size, 0, null_mut())
}

fn free(pointer: *mut c_void) {
    gruyere_free(pointer, 0, 0, null_mut());
}

fn c_path(path: &std::path::Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

fn stats() -> GruyereStats {
    let mut stats =
        GruyereStats { size: size_of::<GruyereStats>() as u32, ..GruyereStats::default() };
    // SAFETY: `stats` has room for what its size says.
    assert_eq!(unsafe { gruyere_stats(0, &mut stats) }, GRUYERE_OK);
    stats
}

#[test]
fn malloc_and_free_keep_books() {
    let (_turn, gpu) = fresh("");
    let (small, large) = (malloc(1), malloc(100 * MIB as isize));
    assert!(!small.is_null() && !large.is_null());
    assert!(gpu.is_backed(large as u64, 100 * MIB));
    assert_eq!(stats().live, 512 + 100 * MIB);
    free(small);
    free(large);
    let stats = stats();
    assert_eq!((stats.live, stats.live_peak, stats.bad_frees), (0, 512 + 100 * MIB, 0));
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn without_torch_what_cannot_be_served_is_null_and_the_next_request_is_served() {
    let (_turn, _gpu) = fresh("");
    for size in [isize::MAX, isize::MIN, -1, 2 * GIB as isize] {
        assert!(malloc(size).is_null(), "{size}");
    }
    assert!(gruyere_malloc(1, 7, null_mut()).is_null());
    assert!(gruyere_malloc(1, -1, null_mut()).is_null());
    let block = malloc(MIB as isize);
    assert!(!block.is_null());
    free(block);
    // What no program means is no attempt.
    assert_eq!(stats().out_of_memories, 1);
}

#[test]
fn null_and_foreign_pointers_may_be_freed_and_recorded() {
    let (_turn, _gpu) = fresh("");
    assert!(malloc(0).is_null());
    free(null_mut());
    gruyere_record_stream(null_mut(), null_mut());
    assert_eq!(stats().bad_frees, 0);
    free(0x1234 as *mut c_void);
    gruyere_record_stream(0x1234 as *mut c_void, null_mut());
    assert_eq!(stats().bad_frees, 2);
}

#[test]
fn streams_are_announced_and_end_and_wrong_devices_are_refused() {
    let (_turn, gpu) = fresh("");
    let stream = as_program(|| gpu.stream_create(0, StreamKind::NonBlocking)).unwrap();
    let handle = stream as *mut c_void;
    // Before anything is allocated, of a default stream, and twice.
    for handle in [stream, 0, 1, 2, stream].map(|handle| handle as *mut c_void) {
        assert_eq!(gruyere_stream_lasts(0, handle), GRUYERE_OK);
    }
    let ids = || gpu.counts(Caller::Allocator).of(CallKind::StreamId);
    for asked in [0, 1] {
        let address = gruyere_malloc(1000, 0, handle);
        assert!(!address.is_null());
        gruyere_free(address, 1000, 0, handle);
        assert_eq!(ids(), asked);
        // From its end on it is a stream like any other.
        assert_eq!(gruyere_stream_ends(0, handle), GRUYERE_OK);
    }
    for device in [-1, 1, 64] {
        assert_eq!(gruyere_stream_lasts(device, handle), GRUYERE_INVALID);
        assert_eq!(gruyere_stream_ends(device, handle), GRUYERE_INVALID);
    }
    // Of no stream that it knows.
    assert_eq!(gruyere_stream_ends(0, 0x1234_5600 as *mut c_void), GRUYERE_OK);
    assert_eq!(gpu.misuses(), []);
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn stats_write_no_more_than_the_caller_has_room_for() {
    let (_turn, _gpu) = fresh("");
    let mut stats = GruyereStats { size: 16, limit: 77, ..GruyereStats::default() };
    // SAFETY: `stats` has more room than its size says.
    assert_eq!(unsafe { gruyere_stats(0, &mut stats) }, GRUYERE_OK);
    assert_eq!(
        (stats.size, stats.version, stats.total_memory, stats.limit),
        (16, GRUYERE_STATS_VERSION, GIB, 77)
    );
    stats.size = 7;
    // SAFETY: as above, and NULL is allowed.
    unsafe {
        assert_eq!(gruyere_stats(0, &mut stats), GRUYERE_INVALID);
        assert_eq!(gruyere_stats(0, null_mut()), GRUYERE_INVALID);
        stats.size = size_of::<GruyereStats>() as u32;
        assert_eq!(gruyere_stats(9, &mut stats), GRUYERE_INVALID);
    }
}

#[test]
fn lifetimes_nest_and_wrong_ones_are_refused() {
    assert_eq!(gruyere_lifetime_push(3), GRUYERE_OK);
    assert_eq!(gruyere_lifetime_push(4), GRUYERE_INVALID);
    assert_eq!(gruyere_lifetime_pop(), GRUYERE_OK);
    assert_eq!(gruyere_lifetime_pop(), GRUYERE_INVALID);
}

#[test]
fn empty_cache_and_trim_give_memory_back_and_the_fraction_is_enforced() {
    let (_turn, gpu) = fresh("");
    free(malloc(200 * MIB as isize));
    assert!(gpu.books(0).physical >= 200 * MIB);
    assert!(gruyere_trim() >= 200 * MIB);
    free(malloc(200 * MIB as isize));
    gruyere_reset();
    assert_eq!(gpu.books(0).physical, 0);
    gruyere_memory_fraction(0.1, 0);
    assert!(malloc(200 * MIB as isize).is_null());
    gruyere_memory_fraction(1.0, 0);
    free(malloc(200 * MIB as isize));
}

#[test]
fn a_fraction_outside_of_0_to_1_changes_nothing() {
    let (_turn, _gpu) = fresh("");
    free(malloc(1 << 20));
    gruyere_memory_fraction(0.25, 0);
    let quarter = stats().limit;
    for wrong in [f64::NAN, -1.0, 1.5, f64::INFINITY] {
        gruyere_memory_fraction(wrong, 0);
        assert_eq!(stats().limit, quarter, "{wrong}");
    }
    gruyere_memory_fraction(1.0, 0);
    assert!(stats().limit > 3 * quarter);
}

#[test]
fn the_base_of_a_foreign_pointer_is_itself() {
    let (_turn, _gpu) = fresh("");
    let block = malloc(4 * MIB as isize);
    let mut size = 0;
    // SAFETY: `size` may be written; NULL is allowed.
    unsafe {
        let base = gruyere_base_alloc(block, &mut size);
        assert!(base <= block && size >= 4 * MIB as usize);
        assert_eq!(gruyere_base_alloc(block, null_mut()), base);
        let foreign = 0x1234 as *mut c_void;
        assert_eq!(gruyere_base_alloc(foreign, &mut size), foreign);
    }
    assert_eq!(size, 0);
    free(block);
}

#[test]
fn a_dump_tells_every_device_and_a_bad_path_is_an_error_code() {
    let (_turn, _gpu) = fresh("");
    let block = malloc(4 * MIB as isize);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dump.txt");
    // SAFETY: NUL-terminated strings; NULL is allowed.
    unsafe {
        assert_eq!(gruyere_dump(c_path(&path).as_ptr()), GRUYERE_OK);
        assert_eq!(gruyere_dump(c_path(&folder.path().join("no/such")).as_ptr()), GRUYERE_IO);
        assert_eq!(gruyere_dump(std::ptr::null()), GRUYERE_INVALID);
    }
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains("device 0") && text.contains(&(4 * MIB).to_string()), "{text}");
    free(block);
}

#[test]
fn a_dump_beyond_the_limit_on_files_is_an_error_code_and_no_signal() {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    const ROLE: &str = "GRUYERE_TEST_DUMP_BEYOND_LIMIT";
    if let Some(path) = std::env::var_os(ROLE) {
        let (_turn, _gpu) = fresh("record:off");
        assert!(!malloc(MIB as isize).is_null());
        let path = std::path::PathBuf::from(path);
        // SAFETY: a NUL-terminated string.
        assert_eq!(unsafe { gruyere_dump(c_path(&path).as_ptr()) }, GRUYERE_IO);
        assert!(!path.exists());
        return;
    }
    // A limit is the whole process's, the test's output included: in one of its own.
    let folder = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_dump_beyond_the_limit_on_files_is_an_error_code_and_no_signal"])
        .env(ROLE, folder.path().join("dump.txt"));
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    // SAFETY: a plain system call, which a forked child may do.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.signal(), None, "{output:?}");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn an_out_of_memory_leaves_a_dump_in_the_folder_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (_turn, _gpu) = fresh(&format!("dump_dir:{}", folder.path().display()));
    assert!(malloc(3 * GIB as isize).is_null());
    let dumps = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    let mut dumps: Vec<_> = dumps.collect();
    dumps.sort();
    let extensions: Vec<_> = dumps.iter().filter_map(|path| path.extension()).collect();
    assert_eq!(extensions, ["html", "json", "pickle", "txt"]);
    let page = std::fs::read_to_string(&dumps[0]).unwrap();
    assert!(page.contains("One request asks for 3 GiB at once"), "the banner");
    // It has source.
    assert_eq!(std::fs::metadata(&dumps[0]).unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(&dumps[3]).unwrap();
    let (head, rest) = text.split_once('\n').unwrap();
    assert!(
        head.starts_with("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has"),
        "{text}"
    );
    assert!(rest.starts_with("One request asks for 3 GiB at once"), "{text}");
}

#[test]
fn a_threshold_that_is_passed_leaves_a_page_and_a_second_one_within_the_minute_none() {
    let folder = tempfile::tempdir().unwrap();
    let conf =
        format!("dump_dir:{},alert:live>100MiB=log+live>200MiB=trim", folder.path().display());
    let (_turn, _gpu) = fresh(&conf);
    let blocks = [150, 150].map(|mib| {
        let block = malloc(mib * MIB as isize);
        // They are looked at when a step ends.
        gruyere_mark_step();
        std::thread::sleep(std::time::Duration::from_millis(1100));
        gruyere_mark_step();
        block
    });
    let pages: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().collect();
    let names: Vec<String> =
        pages.iter().map(|page| page.file_name().into_string().unwrap()).collect();
    let stem = format!("gruyere-alert-{}-gpu0-", std::process::id());
    assert!(names.len() == 1 && names[0].starts_with(&stem), "{names:?}");
    let page = std::fs::read_to_string(pages[0].path()).unwrap();
    assert!(page.contains("The threshold live>100MiB"), "what it is about");
    blocks.into_iter().for_each(free);
}

#[test]
fn a_wrong_configuration_is_refused_with_what_would_be_right() {
    let (_turn, _gpu) = fresh("");
    let driver = || Arc::new(PhantomDriver::new(Arc::new(Gpu::new(GpuConfig::new(GIB)))));
    let unknown = install(driver(), "color:blue").map(|_| ()).unwrap_err();
    assert!(
        unknown.contains("color") && unknown.contains("backing") && unknown.contains("share"),
        "{unknown}"
    );
    let value = install(driver(), "backing:clouds").map(|_| ()).unwrap_err();
    assert!(value.contains("clouds") && value.contains("pool"), "{value}");
    // The old heap goes on.
    free(malloc(1));
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn a_forked_child_may_call_everything_and_touches_nothing() {
    let (_turn, gpu) = fresh("");
    let block = malloc(5 * MIB as isize);
    let before = gpu.counts(gruyere_phantom::Caller::Allocator);
    // SAFETY: the child calls functions that return at once, and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let nothing = malloc(100).is_null();
        free(block);
        gruyere_reset();
        gruyere_mark_step();
        assert!(gruyere_mark_phase(1) == GRUYERE_UNAVAILABLE);
        assert!(gruyere_stream_lasts(0, block) == GRUYERE_UNAVAILABLE);
        assert!(gruyere_stream_ends(0, block) == GRUYERE_UNAVAILABLE);
        let refused = gruyere_validate() == GRUYERE_UNAVAILABLE && gruyere_trim() == 0;
        // SAFETY: ends the child without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!(nothing && refused))) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status}");
    assert_eq!(stats().live, 5 * MIB);
    assert_eq!(
        gpu.counts(gruyere_phantom::Caller::Allocator).of(gruyere_phantom::CallKind::PoolFree),
        before.of(gruyere_phantom::CallKind::PoolFree)
    );
    assert!(
        current().is_some_and(|heap| heap.record().path().is_some_and(|path| path.exists())),
        "the child unlinked the record"
    );
    free(block);
}

#[test]
fn a_trace_has_what_the_process_asked_for_and_nothing_of_its_forked_children() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.trace.zst");
    let (_turn, _gpu) = fresh(&format!("trace:{}", path.display()));
    let (one, other) = (malloc(5000), malloc(3 * MIB as isize));
    gruyere_record_stream(other, std::ptr::without_provenance_mut(1));
    gruyere_mark_step();
    // SAFETY: the child calls functions that return at once, and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let nothing = malloc(100).is_null();
        free(one);
        gruyere_mark_step();
        // SAFETY: ends the child without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!nothing)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status}");
    free(other);
    free(0x1234 as *mut c_void);
    assert!(malloc(3 * GIB as isize).is_null(), "an out-of-memory writes what waits");
    current().unwrap().flush_trace();
    let file = std::fs::File::open(&path).unwrap();
    let text = String::from_utf8(zstd::stream::decode_all(file).unwrap()).unwrap();
    assert_eq!(text, format!("a 1 5000 0 0\na 2 {} 0 0\nr 2 0\nm step\nf 2\n", 3 * MIB));
    free(one);
}

#[test]
fn a_phase_that_is_announced_gives_idle_memory_back() {
    let (_turn, gpu) = fresh("");
    gruyere_announce_hooks(3);
    let kept = malloc(20 << 20);
    free(malloc(400 << 20));
    let held = stats().reserved;
    assert_eq!(gruyere_mark_phase(3), GRUYERE_INVALID);
    assert_eq!(gruyere_mark_phase(1), GRUYERE_OK);
    let after = stats();
    assert!(
        after.reserved < held / 2 && gpu.books(0).physical == after.reserved,
        "{} B",
        after.reserved
    );
    assert_eq!((after.low_phase_trims, after.low_phase_bytes), (1, held - after.reserved));
    assert_eq!(gruyere_mark_phase(0), GRUYERE_OK);
    assert_eq!(gruyere_validate(), GRUYERE_OK);
    free(kept);
}

#[test]
fn hooks_of_pools_in_any_order_are_harmless() {
    let (_turn, _gpu) = fresh("");
    gruyere_announce_hooks(3);
    let id = MempoolId { first: 0, second: 9 };
    gruyere_release_pool(0, id);
    gruyere_end_allocate_to_pool(0, id);
    gruyere_begin_allocate_to_pool(0, id, null_mut());
    let block = malloc(1000);
    gruyere_release_pool(0, id);
    gruyere_end_allocate_to_pool(0, id);
    gruyere_end_allocate_to_pool(0, id);
    gruyere_begin_allocate_to_pool(77, id, null_mut());
    free(block);
    gruyere_mark_step();
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}
