//! Knowing that the calling thread is already inside the library: what it calls from there goes straight to the real functions.
#![deny(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// Whether the thread is inside. A plain cell: nothing runs at the thread's end, so it works to its last instruction.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The thread is inside until this is dropped.
pub struct Inside(PhantomData<*const ()>);

/// Enters, unless the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    // Made only where it is wanted: one that is dropped lets the thread out.
    (!INSIDE.replace(true)).then(|| Inside(PhantomData))
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_once_and_each_for_itself() {
        let first = enter();
        assert!(first.is_some() && enter().is_none());
        std::thread::spawn(|| assert!(enter().is_some(), "another thread is outside")).join().unwrap();
        // The refused entry above must not have let the thread out.
        assert!(enter().is_none());
        drop(first);
        assert!(enter().is_some());
    }
}
