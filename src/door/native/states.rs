//! States of graphs' pools, for torch's checkpoints (`crates/heap/src/pools/restore.rs`).

use super::super::process::{GRUYERE_OK, guarded};
use super::super::torch::MempoolId;
use super::answered;
use crate::heap::PoolState;
use std::ffi::c_int;

/// The live blocks of a pool of CUDA graphs at one moment. It holds no device memory.
#[derive(Debug)]
pub struct GruyerePoolState(PoolState);

/// The blocks of a pool that were live before a restore and those that are live after it: their
/// addresses, in ascending order. The restore has not touched blocks that are in both.
#[repr(C)]
#[derive(Debug)]
pub struct GruyereRestored {
    /// Addresses of the blocks that were live.
    pub before: *const u64,
    /// Their number.
    pub before_count: usize,
    /// Addresses of the blocks that are live.
    pub after: *const u64,
    /// Their number.
    pub after_count: usize,
}

/// Owns the memory behind [`GruyereRestored`], its first field.
#[repr(C)]
struct Held {
    face: GruyereRestored,
    addresses: [Vec<u64>; 2],
}

pub(super) extern "C" fn pool_state(device: c_int, pool: MempoolId) -> *mut GruyerePoolState {
    let mut taken = std::ptr::null_mut();
    answered(|heap| {
        let state = heap.pool_state(i64::from(device), pool.pair())?;
        taken = Box::into_raw(Box::new(GruyerePoolState(state)));
        Ok(GRUYERE_OK)
    });
    taken
}

/// # Safety
/// `state` is NULL, or from [`pool_state`] and not freed yet.
pub(super) unsafe extern "C" fn pool_state_free(state: *mut GruyerePoolState) {
    if !state.is_null() {
        // SAFETY: the caller's promise.
        let state = unsafe { Box::from_raw(state) };
        guarded((), || drop(state));
    }
}

/// # Safety
/// `state` is from [`pool_state`] and not freed before this returns.
pub(super) unsafe extern "C" fn pool_restore(
    state: *const GruyerePoolState,
) -> *mut GruyereRestored {
    // SAFETY: the caller's promise.
    let GruyerePoolState(state) = unsafe { &*state };
    let mut told = std::ptr::null_mut();
    answered(|heap| {
        let done = heap.restore_pool(state)?;
        let with_kept = |others: &[u64]| {
            let mut all = [&done.kept, others].concat();
            all.sort_unstable();
            all
        };
        let addresses = [with_kept(&done.freed), with_kept(&done.allocated)];
        let [before, after] = &addresses;
        let face = GruyereRestored {
            before: before.as_ptr(),
            before_count: before.len(),
            after: after.as_ptr(),
            after_count: after.len(),
        };
        // Moving a vector leaves its buffer in place.
        told = Box::into_raw(Box::new(Held { face, addresses })).cast();
        Ok(GRUYERE_OK)
    });
    told
}

/// # Safety
/// `restored` is NULL, or from [`pool_restore`] and not freed yet.
pub(super) unsafe extern "C" fn restored_free(restored: *mut GruyereRestored) {
    if !restored.is_null() {
        // SAFETY: the caller's promise; `pool_restore` made it from a box of `Held`, whose first
        // field the struct is.
        let held = unsafe { Box::from_raw(restored.cast::<Held>()) };
        guarded((), || drop(held));
    }
}
