//! A map from ranges to values: each point has at most one, the last written.

use std::collections::BTreeMap;

/// Disjoint ranges with a value each.
///
/// A write costs one lookup if it hits exactly an existing range (a slab's slot, over and over),
/// otherwise one step per replaced range. A write adds at most two ranges, so earlier writes pay
/// for the steps.
#[derive(Debug)]
pub(crate) struct Intervals<T> {
    by_start: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for Intervals<T> {
    fn default() -> Self {
        Self { by_start: BTreeMap::new() }
    }
}

impl<T: Clone> Intervals<T> {
    /// Passes each part of the range that has a value to `see`.
    pub(crate) fn visit(&self, start: u64, end: u64, mut see: impl FnMut(u64, u64, &T)) {
        if let Some((_, (before_end, value))) = self.by_start.range(..start).next_back()
            && *before_end > start
        {
            see(start, (*before_end).min(end), value);
        }
        for (&from, (to, value)) in self.by_start.range(start..end) {
            see(from, (*to).min(end), value);
        }
    }

    /// The value of exactly this range, if there is one.
    pub(crate) fn exact_mut(&mut self, start: u64, end: u64) -> Option<&mut T> {
        self.by_start.get_mut(&start).and_then(|(to, value)| (*to == end).then_some(value))
    }

    /// Removes the values of the range, and passes each part to `see` first.
    pub(crate) fn clear(&mut self, start: u64, end: u64, mut see: impl FnMut(u64, u64, &T)) {
        if let Some((_, (before_end, value))) = self.by_start.range_mut(..start).next_back()
            && *before_end > start
        {
            let was = std::mem::replace(before_end, start);
            see(start, was.min(end), value);
            if was > end {
                let rest = value.clone();
                self.by_start.insert(end, (was, rest));
                return;
            }
        }
        while let Some((&from, _)) = self.by_start.range(start..end).next() {
            let Some((to, value)) = self.by_start.remove(&from) else { return };
            see(from, to.min(end), &value);
            if to > end {
                self.by_start.insert(end, (to, value));
                return;
            }
        }
    }

    /// Sets the range's value, and passes each replaced part to `see` first.
    pub(crate) fn replace(
        &mut self,
        start: u64,
        end: u64,
        value: T,
        mut see: impl FnMut(u64, u64, &T),
    ) {
        if start >= end {
            return;
        }
        if let Some(old) = self.exact_mut(start, end) {
            see(start, end, old);
            *old = value;
            return;
        }
        self.clear(start, end, see);
        self.by_start.insert(start, (end, value));
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_start.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_same_range_is_replaced_in_place() {
        let mut map = Intervals::default();
        map.replace(0, 512, 'a', |_, _, _| panic!("nothing there"));
        let mut seen = Vec::new();
        map.replace(0, 512, 'b', |from, to, &value| seen.push((from, to, value)));
        assert_eq!((seen, map.len()), (vec![(0, 512, 'a')], 1));
    }

    proptest! {
        /// Reading and writing agree with an array of points.
        #[test]
        fn every_point_has_the_last_value_written(
            writes in prop::collection::vec((0u64..64, 1u64..24, prop::option::of(0u8..9)), 1..60)
        ) {
            let mut map = Intervals::default();
            let mut points = [None::<u8>; 96];
            for (start, length, value) in writes {
                let end = start + length;
                let mut seen = [None::<u8>; 96];
                let see = |from: u64, to: u64, value: &u8| {
                    for point in &mut seen[from as usize..to as usize] {
                        assert_eq!(*point, None, "a point was shown twice");
                        *point = Some(*value);
                    }
                };
                match value {
                    Some(value) => map.replace(start, end, value, see),
                    None => map.clear(start, end, see),
                }
                prop_assert_eq!(
                    &seen[start as usize..end as usize], &points[start as usize..end as usize]
                );
                points[start as usize..end as usize].fill(value);
                let mut all = [None::<u8>; 96];
                map
                    .visit(
                        0, 96, |from, to, &value| all[from as usize..to as usize].fill(Some(value))
                    );
                prop_assert_eq!(all, points);
            }
        }
    }
}
