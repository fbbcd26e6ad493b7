//! What the C functions about pools, tags, alerts and checkpoints promise a caller. One heap a
//! process, so one test after the other.

mod common;

use common::{GIB, MIB};
use gruyere::door::alert::*;
use gruyere::door::control::*;
use gruyere::door::install;
use gruyere::door::pool::*;
use gruyere::door::torch::*;
use gruyere_phantom::{Caller, Config as GpuConfig, Gpu};
use gruyere_phantom_driver::PhantomDriver;
use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A fresh heap of 1 GiB in the place of the process's.
fn fresh(conf: &str) -> (MutexGuard<'static, ()>, Arc<Gpu>) {
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let gpu = Arc::new(Gpu::new(GpuConfig::new(GIB)));
    install(Arc::new(PhantomDriver::new(gpu.clone())), conf).unwrap();
    (turn, gpu)
}

fn malloc(size: u64) -> *mut c_void {
    gruyere_malloc(size as isize, 0, null_mut())
}

fn free(pointer: *mut c_void) {
    gruyere_free(pointer, 0, 0, null_mut());
}

fn create(name: &str, reserve: u64, limit: u64) -> Result<u64, i32> {
    let name = CString::new(name).unwrap();
    let mut pool = 0;
    // SAFETY: a NUL-terminated string, and a place to write to.
    match unsafe { gruyere_pool_create(name.as_ptr(), 0, reserve, limit, &mut pool) } {
        GRUYERE_OK => Ok(pool),
        code => Err(code),
    }
}

fn release(pool: u64) -> Result<u64, i32> {
    let mut given = 0;
    // SAFETY: a place to write to.
    match unsafe { gruyere_pool_release(pool, &mut given) } {
        GRUYERE_OK => Ok(given),
        code => Err(code),
    }
}

fn stats(pool: u64) -> GruyerePoolStats {
    let size = size_of::<GruyerePoolStats>() as u32;
    let mut stats = GruyerePoolStats { size, ..GruyerePoolStats::default() };
    // SAFETY: `stats` has room for what its size says.
    assert_eq!(unsafe { gruyere_pool_stats(pool, &mut stats) }, GRUYERE_OK);
    stats
}

fn last_error() -> String {
    let mut text = vec![0u8; 1024];
    // SAFETY: as much room as is said.
    let bytes = unsafe { gruyere_last_error(text.as_mut_ptr().cast::<c_char>(), text.len()) };
    text.truncate(bytes);
    String::from_utf8(text).unwrap()
}

#[test]
fn a_pool_is_made_entered_left_and_released() {
    let (_turn, gpu) = fresh("");
    let pool = create("kv", 100 * MIB, 200 * MIB).unwrap();
    assert_eq!(gruyere_pool_enter(pool), GRUYERE_OK);
    let (small, large) = (malloc(1000), malloc(50 * MIB));
    assert_eq!(gruyere_pool_leave(pool), GRUYERE_OK);
    let numbers = stats(pool);
    assert_eq!((numbers.live, numbers.live_blocks), (1024 + 50 * MIB, 2));
    assert_eq!((numbers.version, numbers.reserve, numbers.limit), (1, 100 * MIB, 200 * MIB));
    assert!(numbers.held >= 100 * MIB);

    assert_eq!(release(pool), Err(GRUYERE_BUSY));
    let text = last_error();
    assert!(
        text.starts_with("2 blocks of 50.00 MiB are live in it: 50.00 MiB of step 0"),
        "{text}"
    );
    let mut blocks = [GruyerePoolBlock::default(); 4];
    let mut count = 0;
    // SAFETY: as much room as is said.
    let code = unsafe { gruyere_pool_blocks(pool, blocks.as_mut_ptr(), 4, &mut count) };
    assert_eq!((code, count), (GRUYERE_OK, 2));
    let largest = GruyerePoolBlock { address: large as u64, requested: 50 * MIB, step: 0 };
    assert_eq!((blocks[0], blocks[1].requested), (largest, 1000));

    free(small);
    free(large);
    assert!(release(pool).unwrap() >= 100 * MIB);
    assert_eq!(gpu.books(0).physical, 0);
    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { gruyere_pool_destroy(pool, null_mut()) }, GRUYERE_OK);
    assert_eq!(release(pool), Err(GRUYERE_INVALID));
    assert!(last_error().contains("destroyed"));
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn wrong_arguments_are_refused_in_words() {
    let (_turn, _gpu) = fresh("");
    assert_eq!(create("", 0, 0), Err(GRUYERE_INVALID));
    assert!(last_error().contains("1 to 128 bytes"));
    assert_eq!(create("kv", 3 * GIB, 0), Err(GRUYERE_MEMORY));
    assert!(last_error().contains("3.00 GiB could not be reserved"), "{}", last_error());
    assert_eq!(create("kv", 4 * MIB, MIB), Err(GRUYERE_INVALID));
    assert_eq!(gruyere_pool_enter(12345), GRUYERE_INVALID);
    assert_eq!(gruyere_pool_leave(12345), GRUYERE_INVALID);
    let mut pool = 0;
    let latin1 = [0xe9u8, 0];
    // SAFETY: NUL-terminated, or NULL, which is allowed.
    unsafe {
        assert_eq!(gruyere_pool_create(null(), 0, 0, 0, &mut pool), GRUYERE_INVALID);
        assert_eq!(gruyere_pool_create(c"a".as_ptr(), 0, 0, 0, null_mut()), GRUYERE_INVALID);
        assert_eq!(
            gruyere_pool_create(latin1.as_ptr().cast(), 0, 0, 0, &mut pool),
            GRUYERE_INVALID
        );
        assert_eq!(gruyere_pool_create(c"a".as_ptr(), 9, 0, 0, &mut pool), GRUYERE_INVALID);
        assert_eq!(gruyere_pool_stats(1, null_mut()), GRUYERE_INVALID);
        assert_eq!(gruyere_pool_blocks(1, null_mut(), 0, null_mut()), GRUYERE_INVALID);
        assert_eq!(gruyere_next_alert(null_mut(), 0), GRUYERE_INVALID);
    }
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn an_error_is_cut_to_the_room_there_is() {
    let (_turn, _gpu) = fresh("");
    assert_eq!(create("", 0, 0), Err(GRUYERE_INVALID));
    let whole = last_error();
    let mut short = [b'x'; 9];
    // SAFETY: as much room as is said; NULL is allowed.
    unsafe {
        assert_eq!(gruyere_last_error(short.as_mut_ptr().cast::<c_char>(), 8), whole.len());
        assert_eq!(gruyere_last_error(null_mut(), 8), whole.len());
    }
    assert_eq!(&short[..8], [&whole.as_bytes()[..7], &[0]].concat());
    assert_eq!(short[8], b'x');
}

#[test]
fn tags_find_live_blocks_only() {
    let (_turn, _gpu) = fresh("");
    let block = malloc(5 * MIB);
    assert_eq!(gruyere_tag(block, 3), GRUYERE_OK);
    assert_eq!(gruyere_tag(block, 4), GRUYERE_INVALID);
    assert_eq!(gruyere_tag(0x1234 as *mut c_void, 3), GRUYERE_INVALID);
    free(block);
    assert_eq!(gruyere_tag(block, 3), GRUYERE_INVALID);
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}

#[test]
fn a_checkpoint_gives_idle_memory_back() {
    let (_turn, gpu) = fresh("");
    free(malloc(300 * MIB));
    assert!(gruyere_checkpoint() >= 300 * MIB);
    assert_eq!(gpu.books(0).physical, 0);
    free(malloc(300 * MIB));
    assert_eq!(gruyere_checkpoint(), 0, "not again so soon");
}

#[test]
fn an_alert_reaches_the_callback_and_the_queue() {
    extern "C" fn callback(alert: *const GruyereAlert, context: *mut c_void) {
        // SAFETY: valid during the call, by the contract; the context is what was registered.
        let (alert, sum) = unsafe { (&*alert, &*context.cast::<AtomicU64>()) };
        assert_eq!((alert.device, alert.asked), (0, 3 * GIB));
        sum.fetch_add(u64::from(alert.kind), Ordering::Relaxed);
    }
    static SUM: AtomicU64 = AtomicU64::new(0);
    let (_turn, _gpu) = fresh("");
    assert_eq!(gruyere_on_alert(Some(callback), (&raw const SUM).cast_mut().cast()), GRUYERE_OK);
    assert!(malloc(3 * GIB).is_null());
    assert_eq!(gruyere_on_alert(None, null_mut()), GRUYERE_OK);
    assert_eq!(SUM.load(Ordering::Relaxed), 3, "one of each kind");
    let mut alert = GruyereAlert::default();
    let mut kinds = Vec::new();
    // SAFETY: a place to write to.
    while unsafe { gruyere_next_alert(&mut alert, 0) } == 1 {
        kinds.push(alert.kind);
    }
    assert_eq!(kinds, [GRUYERE_ALERT_RECLAIM, GRUYERE_ALERT_OUT_OF_MEMORY]);
}

#[test]
fn a_forked_child_may_call_everything_and_touches_nothing() {
    let (_turn, gpu) = fresh("");
    let pool = create("kv", 10 * MIB, 0).unwrap();
    assert_eq!(gruyere_pool_enter(pool), GRUYERE_OK);
    let block = malloc(5 * MIB);
    let before = gpu.counts(Caller::Allocator);
    // SAFETY: the child calls functions that return at once, and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut alert = GruyereAlert::default();
        let mut numbers = GruyerePoolStats { size: 64, ..GruyerePoolStats::default() };
        // SAFETY: places to write to.
        let waits = unsafe {
            gruyere_next_alert(&mut alert, 100_000) == GRUYERE_UNAVAILABLE
                && gruyere_pool_stats(pool, &mut numbers) == GRUYERE_UNAVAILABLE
        };
        free(block);
        let refused = waits
            && malloc(100).is_null()
            && release(pool) == Err(GRUYERE_UNAVAILABLE)
            && create("other", 0, 0) == Err(GRUYERE_UNAVAILABLE)
            && gruyere_pool_leave(pool) == GRUYERE_UNAVAILABLE
            && gruyere_tag(block, 3) == GRUYERE_UNAVAILABLE
            && gruyere_on_alert(None, null_mut()) == GRUYERE_UNAVAILABLE
            && gruyere_checkpoint() == 0;
        // SAFETY: ends the child without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status}");
    assert_eq!(gpu.counts(Caller::Allocator), before);
    assert_eq!(stats(pool).live_blocks, 1);
    free(block);
    assert_eq!(gruyere_pool_leave(pool), GRUYERE_OK);
    assert!(release(pool).unwrap() >= 10 * MIB);
    assert_eq!(gruyere_validate(), GRUYERE_OK);
}
