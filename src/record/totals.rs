//! Live bytes of a device and their exact peak, without a word that every malloc writes.
//!
//! Each lane counts its own live bytes, and has a ceiling. The ceilings of a device's lanes sum up to no more than the
//! known peak, so as long as every lane stays at or below its own, the sum of live bytes is not above the peak and there is
//! nothing to do. A lane that passes its ceiling settles, under the device's mutex: the sum is taken; if it is above the
//! peak, that is the new peak; else the lane gets a share of what lies between the two. A lane that frees keeps its
//! ceiling, so a program that comes back to its old peak every step does not settle at all.
//!
//! Exact as long as calls on different lanes don't overlap in time; where they do, a settling lane may miss a block whose
//! count another processor has not yet made visible (some nanoseconds), until that lane's next call.

use super::sync::{AtomicU64, Ordering, fence};

/// One lane's share, on a line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct LaneTotals {
    /// Bytes inserted less bytes removed through this lane, wrapping: negative (as i64) where blocks were inserted through
    /// another. Written by the lane's writer only.
    live: AtomicU64,
    /// What `live` may reach without a look at the peak (as i64). Written under the device's mutex only.
    ceiling: AtomicU64,
    /// For peaks by pool.
    _room: [AtomicU64; 6],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<LaneTotals>() == 64);

impl LaneTotals {
    /// Adds to what is live; whether the lane must settle. Four instructions.
    #[inline(always)]
    #[must_use]
    pub fn add(&self, bytes: u64) -> bool {
        let live = self.live.load(Ordering::Relaxed).wrapping_add(bytes);
        self.live.store(live, Ordering::Relaxed);
        live as i64 > self.ceiling.load(Ordering::Relaxed) as i64
    }

    /// Takes from what is live; whether more was taken than ever came through this lane. Two instructions.
    #[inline(always)]
    #[must_use]
    pub fn sub(&self, bytes: u64) -> bool {
        let live = self.live.load(Ordering::Relaxed).wrapping_sub(bytes);
        self.live.store(live, Ordering::Relaxed);
        (live as i64) < 0
    }

    fn live(&self) -> i64 {
        self.live.load(Ordering::Relaxed) as i64
    }

    fn ceiling(&self) -> i64 {
        self.ceiling.load(Ordering::Relaxed) as i64
    }

    fn set_ceiling(&self, ceiling: i64) {
        if self.ceiling() != ceiling {
            self.ceiling.store(ceiling as u64, Ordering::Relaxed);
        }
    }
}

/// Live bytes over all of a device's lanes.
pub fn live<'a>(lanes: impl Iterator<Item = &'a LaneTotals>) -> u64 {
    lanes.fold(0, |sum: i64, lane| sum.wrapping_add(lane.live())).max(0) as u64
}

/// Settles the lane `mine`, which passed its ceiling. The caller holds the device's mutex; `lanes` are all lanes whose live
/// bytes were ever other than 0.
pub fn settle<'a>(peak: &AtomicU64, lanes: impl Iterator<Item = &'a LaneTotals> + Clone, mine: &LaneTotals) {
    // Once, unless another lane ran past a ceiling while we lowered it.
    for _ in 0..4 {
        let sum = live(lanes.clone()) as i64;
        let known = peak.load(Ordering::Relaxed) as i64;
        if sum >= known {
            peak.store(sum as u64, Ordering::Relaxed);
            lanes.clone().for_each(|lane| lane.set_ceiling(lane.live()));
        } else {
            share(known - sum, lanes.clone(), mine);
        }
        // Orders our stores of ceilings before the loads of what is live.
        fence(Ordering::SeqCst);
        if lanes.clone().all(|lane| lane.live() <= lane.ceiling()) {
            return;
        }
    }
}

/// Gives the lane `mine` what the others don't have of `gap` (peak less live), and at least half of it.
fn share<'a>(gap: i64, lanes: impl Iterator<Item = &'a LaneTotals> + Clone, mine: &LaneTotals) {
    let slack = |lane: &LaneTotals| lane.ceiling().saturating_sub(lane.live()).max(0);
    let others = || lanes.clone().filter(|lane| !std::ptr::eq(*lane, mine));
    let taken: i128 = others().map(|lane| i128::from(slack(lane))).sum();
    let most = i128::from(gap / 2);
    let mut left = i128::from(gap) - taken;
    if taken > most {
        left = i128::from(gap);
        for lane in others() {
            let part = i128::from(slack(lane)) * most / taken;
            lane.set_ceiling(lane.live() + part as i64);
            left -= part;
        }
    }
    mine.set_ceiling(mine.live() + left as i64);
}

/// The peak begins again at what is live. The caller holds the device's mutex.
pub fn reset<'a>(peak: &AtomicU64, mut lanes: impl Iterator<Item = &'a LaneTotals> + Clone) {
    peak.store(0, Ordering::Relaxed);
    let all = lanes.clone();
    if let Some(any) = lanes.next() {
        settle(peak, all, any);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_peak_is_exact_whatever_lanes_do_in_turn(
            calls in proptest::collection::vec((0usize..5, 1u64..100, 0u8..8), 1..400),
        ) {
            let lanes: Vec<LaneTotals> = (0..5).map(|_| LaneTotals::default()).collect();
            let lanes: Vec<&LaneTotals> = lanes.iter().collect();
            let peak = AtomicU64::new(0);
            let (mut sum, mut highest, mut blocks) = (0u64, 0u64, Vec::new());
            for (lane, size, what) in calls {
                match what {
                    0..=4 => {
                        sum += size * 512;
                        highest = highest.max(sum);
                        blocks.push(size * 512);
                        if lanes[lane].add(size * 512) {
                            settle(&peak, lanes.iter().copied(), lanes[lane]);
                        }
                    }
                    // Any block, by any lane: removals need not come back to the lane of the insert.
                    5..=6 if !blocks.is_empty() => {
                        let size = blocks.swap_remove(size as usize % blocks.len());
                        sum -= size;
                        let _ = lanes[lane].sub(size);
                    }
                    _ if size < 10 => {
                        highest = sum;
                        reset(&peak, lanes.iter().copied());
                    }
                    _ => {}
                }
                prop_assert_eq!(live(lanes.iter().copied()), sum);
                prop_assert_eq!(peak.load(Ordering::Relaxed), highest);
                let ceilings: i64 = lanes.iter().map(|lane| lane.ceiling()).sum();
                prop_assert!(ceilings <= highest as i64);
            }
        }
    }

    #[test]
    fn a_lane_that_comes_back_to_its_old_peak_does_not_settle() {
        let lane = LaneTotals::default();
        let peak = AtomicU64::new(0);
        for step in 0..3 {
            for block in 0..100 {
                let must = lane.add(512);
                assert_eq!(must, step == 0, "step {step}, block {block}");
                if must {
                    settle(&peak, std::iter::once(&lane), &lane);
                }
            }
            (0..100).for_each(|_| assert!(!lane.sub(512)));
        }
        assert_eq!(peak.load(Ordering::Relaxed), 51_200);
    }
}
