//! The origins of requests in torch's words: boxes that the shim makes while the history is on, by
//! the numbers that the heap notes.
//!
//! The heap's history keeps a number with each entry and drops entries silently once it is full. So
//! each time the boxes have doubled since the last search, a search of all of them finds the boxes
//! whose number is unused.

use super::boxed::Boxed;
use crate::heap::Heap;
use crate::heap::history::{self, Collected};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Up to this many boxes, no search.
const FEW: usize = 1 << 14;

struct Contexts {
    boxes: HashMap<u64, Arc<Boxed>>,
    /// Numbers of running calls: the heap may not have noted them yet.
    running: HashSet<u64>,
    last: u64,
    /// The number of boxes that starts a search.
    many: usize,
}

static CONTEXTS: Mutex<Option<Contexts>> = Mutex::new(None);

fn contexts() -> MutexGuard<'static, Option<Contexts>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Contexts {
    fn default() -> Self {
        Self { boxes: HashMap::new(), running: HashSet::new(), last: 0, many: FEW }
    }
}

impl Contexts {
    fn add(&mut self, boxed: Boxed) -> u64 {
        self.last += 1;
        self.boxes.insert(self.last, Arc::new(boxed));
        self.running.insert(self.last);
        self.last
    }

    /// Takes out the boxes that are neither in `used` nor newer than `since`.
    fn unused(&mut self, used: &HashSet<u64>, since: u64) -> Vec<Arc<Boxed>> {
        let gone = self.boxes.extract_if(|number, _| *number <= since && !used.contains(number));
        let gone = gone.map(|(_, boxed)| boxed).collect();
        self.many = FEW.max(2 * self.boxes.len());
        gone
    }
}

/// Makes `boxed` the origin of the calling thread's requests until [`leave`]; returns the number of
/// the previous origin.
pub(super) fn enter(heap: &Heap, boxed: Boxed) -> u64 {
    let (number, running) = {
        let mut guard = contexts();
        let all = guard.get_or_insert_default();
        let number = all.add(boxed);
        (number, (all.boxes.len() > all.many).then(|| all.running.clone()))
    };
    let before = history::set_context(number);
    if let Some(mut used) = running {
        // Entries noted from here on belong to a running call or are newer.
        used.extend(numbers(&heap.history()));
        let gone = contexts().as_mut().map(|all| all.unused(&used, number));
        // Here, with no lock held.
        drop(gone);
    }
    before
}

/// Restores the calling thread's previous origin; `before` is what [`enter`] returned.
pub(super) fn leave(before: u64) {
    let number = history::set_context(before);
    if let Some(all) = contexts().as_mut() {
        all.running.remove(&number);
    }
}

/// Forgets all boxes but those of running calls. The history is over, or is cleared.
pub(super) fn forget() {
    let gone = contexts().as_mut().map(|all| {
        let (running, last) = (all.running.clone(), all.last);
        all.unused(&running, last)
    });
    drop(gone);
}

fn numbers(collected: &Collected) -> HashSet<u64> {
    let entries = collected.entries.iter().flat_map(|entry| [entry.context, entry.origin]);
    entries.chain(collected.origins.iter().map(|origin| origin.context)).collect()
}

/// The boxes of these numbers; `None` where a number has none.
pub(super) fn of(numbers: impl Iterator<Item = u64>) -> Vec<Option<Arc<Boxed>>> {
    let guard = contexts();
    numbers.map(|number| guard.as_ref().and_then(|all| all.boxes.get(&number).cloned())).collect()
}

#[cfg(test)]
mod tests {
    use super::super::boxed::GruyereBoxed;
    use super::*;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_: *mut c_void) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }

    fn boxed() -> Boxed {
        Boxed::new(GruyereBoxed { object: std::ptr::dangling_mut(), drop: count }).unwrap()
    }

    #[test]
    fn boxes_go_when_neither_an_entry_nor_a_call_has_their_number() {
        let mut all = Contexts::default();
        let [noted, gone, newer] = [boxed(), boxed(), boxed()].map(|boxed| all.add(boxed));
        drop(all.unused(&HashSet::from([noted]), gone));
        assert_eq!(DROPPED.load(Ordering::Relaxed), 1);
        assert!(!all.boxes.contains_key(&gone));
        assert!(all.boxes.contains_key(&noted) && all.boxes.contains_key(&newer));
        drop(all.unused(&HashSet::new(), newer));
        assert_eq!(DROPPED.load(Ordering::Relaxed), 3);
    }
}
