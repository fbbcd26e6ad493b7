//! The calling thread's own C stack, which proves whether a thread state's frames are this
//! thread's.
//!
//! A state made on this thread may run on another one meanwhile, while this thread waits in C
//! without the interpreter's lock. Then the innermost frames are the other thread's, and change.
//! But the interpreter's loop leaves a mark of each run on the stack of the running thread; and the
//! runs that another thread begins on top leave those below unchanged.

use std::cell::Cell;
use std::mem::MaybeUninit;

/// Bytes of the stack that are searched for a word: torch's operators are far below.
const MOST_SEARCHED: usize = 64 << 10;

thread_local! {
    /// The bounds of the calling thread's stack; an end of 0: not asked yet.
    static BOUNDS: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Whether `address` is on the calling thread's stack, in a call that is not over.
#[inline]
pub(super) fn has(address: usize) -> bool {
    let here = here();
    let (low, high) = bounds();
    low <= here && here <= address && address < high
}

/// Whether `wanted` is a word on the calling thread's stack, in a call that is not over.
pub(super) fn holds(wanted: usize) -> bool {
    const WORD: usize = size_of::<usize>();
    let here = here().next_multiple_of(WORD);
    let (low, high) = bounds();
    if here < low || here >= high {
        return false;
    }
    let end = high.min(here + MOST_SEARCHED);
    // SAFETY: all of the stack can be read from its current end to its beginning; volatile, as the
    // words there are no variables of ours.
    (here..end - (WORD - 1))
        .step_by(WORD)
        .any(|at| unsafe { (at as *const usize).read_volatile() } == wanted)
}

/// The current end of the stack.
#[inline(always)]
fn here() -> usize {
    let mark = 0u8;
    std::hint::black_box(&raw const mark) as usize
}

#[inline]
fn bounds() -> (usize, usize) {
    // A thread that is ending has no value any more.
    BOUNDS
        .try_with(|bounds| {
            if bounds.get().1 == 0 {
                bounds.set(ask());
            }
            bounds.get()
        })
        .unwrap_or(NOWHERE)
}

/// Bounds that contain nothing.
const NOWHERE: (usize, usize) = (usize::MAX, 1);

#[cold]
fn ask() -> (usize, usize) {
    let mut about = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut low, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: the calling thread exists; its attributes are filled before they are read, and given
    // back once.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), about.as_mut_ptr()) != 0 {
            return NOWHERE;
        }
        let failed = libc::pthread_attr_getstack(about.as_ptr(), &mut low, &mut bytes);
        libc::pthread_attr_destroy(about.as_mut_ptr());
        if failed != 0 {
            return NOWHERE;
        }
    }
    (low as usize, low as usize + bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks from a frame of its own: the compiler chooses whether a variable lies before or behind
    /// the mark in the asking frame.
    #[inline(never)]
    fn of_a_caller(address: usize) -> bool {
        has(address)
    }

    #[test]
    fn what_is_on_this_threads_stack_is_told_from_what_is_on_anothers_or_in_the_heap() {
        let here = std::hint::black_box(0x0123_4567_89ab_cdefusize);
        let address = &raw const here as usize;
        let boxed = Box::new(0u8);
        assert!(of_a_caller(address) && !of_a_caller(&raw const *boxed as usize));
        assert!(!std::thread::spawn(move || has(address)).join().unwrap());
        std::thread::spawn(|| {
            let own = std::hint::black_box(0u8);
            assert!(of_a_caller(std::hint::black_box(&raw const own) as usize));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_word_is_found_on_the_stack_that_holds_it() {
        // The program holds no constant of this value.
        let wanted = std::hint::black_box(0x5bd1_e995usize).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let kept = std::hint::black_box([wanted]);
        assert!(holds(kept[0]));
        let part = kept[0] ^ 0xff;
        assert!(!std::thread::spawn(move || holds(part ^ part.rotate_left(9))).join().unwrap());
        std::hint::black_box(&kept);
    }
}
