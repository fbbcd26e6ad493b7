//! cuFFT: plans are real, transforms are empty launches.
//!
//! The sizes of a plan's work area, which torch allocates, and of a plan's own memory are known
//! only to cuFFT: here both are 0, and each plan is counted (`unknown_workspaces` in the books).

use crate::abi::{Counter, Out};
use crate::entry::succeeds;
use crate::handle::launched;
use crate::workspaces;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

// `cufftResult`.
const INVALID_PLAN: u32 = 1;
const INVALID_VALUE: u32 = 4;
const EXEC_FAILED: u32 = 6;

/// Plans by number, each with its stream.
static PLANS: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

fn plans() -> MutexGuard<'static, BTreeMap<i32, usize>> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub extern "C" fn cufftCreate(out: Out<i32>) -> u32 {
    let mut plans = plans();
    let number = plans.last_key_value().map_or(1, |(&last, _)| last + 1);
    let Ok(()) = out.put(number) else { return INVALID_VALUE };
    plans.insert(number, 0);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cufftDestroy(plan: i32) -> u32 {
    plans().remove(&plan).map_or(INVALID_PLAN, |_| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cufftSetStream(plan: i32, stream: usize) -> u32 {
    plans().get_mut(&plan).map_or(INVALID_PLAN, |set| {
        *set = stream;
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cufftXtMakePlanMany(
    _plan: i32,
    _rank: i32,
    _n: usize,
    _in_embed: usize,
    _in_stride: i64,
    _in_distance: i64,
    _in_type: u32,
    _out_embed: usize,
    _out_stride: i64,
    _out_distance: i64,
    _out_type: u32,
    _batch: i64,
    bytes: Out<usize>,
    _execution_type: u32,
) -> u32 {
    workspaces::unknown("cufftXtMakePlanMany");
    bytes.put(0).map_or(INVALID_VALUE, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cufftXtExec(plan: i32, _in: usize, _out: usize, _direction: i32) -> u32 {
    static CALLS: Counter = Counter::new("cufftXtExec");
    // The lock is released before the launch.
    let stream = plans().get(&plan).copied();
    stream.map_or(INVALID_PLAN, |stream| launched(&CALLS, stream, EXEC_FAILED))
}

succeeds! { cufftSetAutoAllocation cufftSetWorkArea }
