//! Knowing that the calling thread is already inside the library: what it calls from there goes
//! straight to the real functions.

use std::cell::Cell;

thread_local! {
    /// Whether the thread is inside. A plain cell: nothing runs at the thread's end, so it works to
    /// its last instruction.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The thread is inside until this is dropped. (The address of the thread's cell: to look it up
/// again would cost as much as all else here.)
pub struct Inside(*const Cell<bool>);

/// Enters, unless the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    // Made only where it is wanted: one that is dropped lets the thread out.
    INSIDE.with(|cell| (!cell.replace(true)).then(|| Inside(cell)))
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the cell of this very thread, since a pointer keeps this from being sent to
        // another; it stands as long as the thread does.
        unsafe { &*self.0 }.set(false);
    }
}

/// The thread is outside until this is dropped, and then as it was.
pub struct Outside(bool);

/// Leaves for a while: the program's own code is about to be called.
pub fn leave() -> Outside {
    Outside(INSIDE.replace(false))
}

impl Drop for Outside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_once_and_each_for_itself() {
        let first = enter();
        assert!(first.is_some() && enter().is_none());
        std::thread::spawn(|| assert!(enter().is_some(), "another thread is outside"))
            .join()
            .unwrap();
        // The refused entry above must not have let the thread out.
        assert!(enter().is_none());
        let outside = leave();
        drop(enter().expect("the program's own code is outside"));
        drop(outside);
        assert!(enter().is_none());
        drop(first);
        assert!(enter().is_some());
    }
}
