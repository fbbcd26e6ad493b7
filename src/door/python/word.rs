//! Words of the interpreter's objects, read where they lie.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// The word at `at` bytes of `base`.
///
/// # Safety
/// The word exists, and no thread writes it meanwhile.
#[inline(always)]
pub(super) unsafe fn word(base: usize, at: usize) -> usize {
    // SAFETY: the caller's promise; Python aligns its words.
    unsafe { ((base + at) as *const usize).read() }
}

/// As [`word`].
///
/// # Safety
/// As [`word`].
#[inline(always)]
pub(super) unsafe fn number(base: usize, at: usize) -> i32 {
    // SAFETY: as above.
    unsafe { ((base + at) as *const i32).read() }
}

/// As [`word`], for a word that other threads may write meanwhile.
///
/// # Safety
/// The word exists.
#[inline(always)]
pub(super) unsafe fn word_now(base: usize, at: usize) -> usize {
    // SAFETY: the caller's promise; Python aligns its words.
    unsafe { AtomicUsize::from_ptr((base + at) as *mut usize) }.load(Ordering::Acquire)
}

/// As [`word_now`].
///
/// # Safety
/// As [`word_now`].
#[inline(always)]
pub(super) unsafe fn number_now(base: usize, at: usize) -> u32 {
    // SAFETY: as above.
    unsafe { AtomicU32::from_ptr((base + at) as *mut u32) }.load(Ordering::Acquire)
}

/// Adds a word to a hash.
#[inline(always)]
pub(super) fn mix(hash: u64, word: u64) -> u64 {
    // The multiplier of FxHash, and a rotation, so that the order counts.
    (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}
