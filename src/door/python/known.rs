//! Known stacks: maps a stack's hash to its site on the record.
//!
//! A lock-free table of fixed size. A stack that finds its two cells taken evicts the older one; an
//! evicted stack is looked up on the record again when it comes back.

use crate::record::sites::SiteId;
use std::sync::atomic::{AtomicU64, Ordering};

/// Cells, a power of two.
const CELLS: usize = 1 << 13;

/// A stack and its site.
///
/// ```text
///   lock    key ^ value   any thread that has learnt a site, in any order with
///   value   the site      any other
/// ```
/// Two threads may write one cell at once, or one may write what another reads: a value is believed
/// only where the two words give back the key that is looked for, so a torn cell is an empty one.
#[derive(Default)]
struct Cell {
    lock: AtomicU64,
    value: AtomicU64,
}

/// The table.
pub(super) struct Known(Box<[Cell]>);

impl Default for Known {
    fn default() -> Self {
        Self((0..CELLS).map(|_| Cell::default()).collect())
    }
}

impl Known {
    #[inline]
    fn cells(&self, key: u64) -> [&Cell; 2] {
        // The high bits are the well mixed ones.
        let at = (key >> 32) as usize % CELLS;
        [&self.0[at], &self.0[at ^ 1]]
    }

    /// The site of a stack.
    #[inline]
    pub(super) fn get(&self, key: u64) -> Option<SiteId> {
        self.cells(key).into_iter().find_map(|cell| {
            let value = cell.value.load(Ordering::Relaxed);
            // 0 is no site: an empty cell belongs to key 0.
            (cell.lock.load(Ordering::Relaxed) ^ value == key && value != 0)
                .then_some(SiteId(value as u32))
        })
    }

    /// Notes the site of a stack.
    pub(super) fn set(&self, key: u64, site: SiteId) {
        let [first, second] = self.cells(key);
        let (lock, value) =
            (first.lock.load(Ordering::Relaxed), first.value.load(Ordering::Relaxed));
        if value != 0 && lock ^ value != key {
            second.lock.store(lock, Ordering::Relaxed);
            second.value.store(value, Ordering::Relaxed);
        }
        first.lock.store(key ^ u64::from(site.0), Ordering::Relaxed);
        first.value.store(u64::from(site.0), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_known_until_two_others_have_come_to_its_place() {
        let known = Known::default();
        let keys = [1, 2, 3].map(|low| (7 << 32) | low);
        assert!(keys.iter().all(|&key| known.get(key).is_none()));
        for (number, &key) in keys.iter().enumerate() {
            known.set(key, SiteId(number as u32 + 1));
            assert_eq!(known.get(key), Some(SiteId(number as u32 + 1)));
        }
        assert_eq!(known.get(keys[0]), None);
        assert_eq!(known.get(keys[1]), Some(SiteId(2)));
    }

    #[test]
    fn an_empty_table_knows_not_even_the_key_0() {
        assert_eq!(Known::default().get(0), None);
    }
}
