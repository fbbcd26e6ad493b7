//! Notes that the calling thread is inside the library: its calls from there go straight to the
//! real functions.

use std::cell::Cell;

thread_local! {
    /// Whether the thread is inside. A plain cell: nothing runs at the thread's end, so it works to
    /// the thread's last instruction.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Keeps the thread inside until dropped. (Holds the address of the thread's cell: a second lookup
/// would cost as much as all else here.)
pub struct Inside(*const Cell<bool>);

/// Enters, unless the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    // Made only on success: dropping one lets the thread out.
    INSIDE.with(|cell| (!cell.replace(true)).then(|| Inside(cell)))
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the cell of this very thread, since a pointer keeps this from being sent to
        // another; it lives as long as the thread does.
        unsafe { &*self.0 }.set(false);
    }
}

/// Keeps the thread outside until dropped, then restores its previous state.
pub struct Outside(bool);

/// Leaves for a while, before a call of the program's own code.
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
