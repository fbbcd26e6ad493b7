//! The exact peaks of a device: of live and of active (live or waiting) blocks, by pool, since the
//! last reset.
//!
//! Nothing here is on the hot path. Each shard has ceilings ([`crate::totals`]) whose sum stays
//! within the peaks, so a peak can only be passed after some shard has passed a ceiling of its own.
//! Such a shard reconciles, under the device's mutex: it takes room that no shard has, then room
//! that others do not use; a program of many streams near its peak does that at every malloc. If
//! all shards together have too little, the sums are taken, and a sum above a peak is the new peak.
//! Other changes of the sums (blocks that wait for streams) are rare, and come here too.
//!
//! Exact as long as calls on different shards don't overlap in time; else a reconciling shard may
//! miss a block whose count another processor has not yet made visible (some nanoseconds), until
//! that shard's next call.
//! nanoseconds), until that shard's next call.
#![deny(unsafe_code)]

use crate::gauges::BlockCounts;
use crate::sync::{AtomicU64, Ordering, fence};
use crate::totals::{BLOCKS, BYTES, QUANTITIES, REQUESTED, ShardTotals};

/// Number of torch's pools, their sum included.
pub const POOLS: usize = 3;
/// Blocks of both pools.
pub const ALL: usize = 0;
/// Blocks of up to 1 MiB.
pub const SMALL: usize = 1;
/// Larger ones.
pub const LARGE: usize = 2;

/// Bytes, blocks and requested bytes, by their numbers in [`crate::totals`].
pub type Amounts = [i64; QUANTITIES];

/// Up to this number, all shards are reconciled at once: checking first whether they have the
/// missing room costs as much, and in a growing program they lack it at every malloc.
const FEW_SHARDS: usize = 4;

/// The amounts of one block.
pub fn amounts(size: u64, requested: u64) -> Amounts {
    let mut amounts = [0; QUANTITIES];
    amounts[BYTES] = size as i64;
    amounts[BLOCKS] = 1;
    amounts[REQUESTED] = requested as i64;
    amounts
}

/// One number over time, as torch reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The highest since the last reset of peaks.
    pub peak: u64,
    /// Sum of increases since the last reset of accumulated counts.
    pub allocated: u64,
    /// Sum of decreases since then.
    pub freed: u64,
}

/// Blocks of a device, by pool ([`ALL`], [`SMALL`], [`LARGE`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockStats {
    /// Blocks held by the program.
    pub allocation: [Stat; POOLS],
    /// Their bytes, each rounded up to 512.
    pub allocated_bytes: [Stat; POOLS],
    /// Blocks held by the program, or freed and waiting for streams.
    pub active: [Stat; POOLS],
    /// Their bytes, rounded.
    pub active_bytes: [Stat; POOLS],
    /// Their requested bytes.
    pub requested_bytes: [Stat; POOLS],
}

/// Numbers of one quantity, by pool.
type ByPool = [i64; POOLS];

/// A shard, and whether it is that of the large blocks (the last).
pub type Member<'a> = (bool, &'a ShardTotals);

/// Guarded by a device's mutex: the peaks, and the part of the sums outside the shards.
#[derive(Debug, Default)]
pub struct Books {
    /// Shards ever used, a bit each.
    pub used: u64,
    /// Freed by the program and waiting for streams: small, large.
    pending: [Amounts; 2],
    /// The highest live amounts, by quantity.
    live: [ByPool; QUANTITIES],
    /// The highest active amounts, by quantity.
    active: [ByPool; QUANTITIES],
    /// Flows in (0) and out (1) at the last reset: of live and active blocks, small and large.
    base: [[Flow; 2]; 2],
}

/// Scales amounts down so that their sum keeps a bound.
#[derive(Clone, Copy)]
struct Scale(Option<u64>);

impl Scale {
    const BITS: u32 = 63;

    /// Scales the sum `whole` to at most `most`. One division, however many amounts: a program of
    /// many streams comes here at every malloc that passes a ceiling, with an amount per shard.
    fn new(most: i64, whole: i64) -> Self {
        let part = |most, whole| (u128::from(most) << Self::BITS) / u128::from(whole);
        Self((whole > most).then(|| part(most.max(0) as u64, whole as u64) as u64))
    }

    /// Rounded down, so that the sum stays within its bound.
    #[inline(always)]
    fn of(self, amount: i64) -> i64 {
        match self.0 {
            None => amount,
            Some(part) => ((u128::from(amount as u64) * u128::from(part)) >> Self::BITS) as i64,
        }
    }

    /// Whether nothing changes.
    fn is_identity(self) -> bool {
        self.0.is_none()
    }
}

/// Gives the room between the sums and the peaks (`gaps`, by pool) to the shard `mine`, except what
/// the others keep.
#[inline(never)]
fn redistribute<'a>(
    quantity: usize,
    gaps: ByPool,
    shards: impl Iterator<Item = Member<'a>> + Clone,
    mine: &ShardTotals,
) {
    let slack =
        |shard: &ShardTotals| shard.ceiling(quantity).saturating_sub(shard.live(quantity)).max(0);
    // Room of the other shards before they come here.
    let (mut small_slack, mut large_slack) = (0i64, 0i64);
    let mut mine_is_large = false;
    for (is_large, shard) in shards.clone() {
        if std::ptr::eq(shard, mine) {
            mine_is_large = is_large;
            continue;
        }
        let slacks = if is_large { &mut large_slack } else { &mut small_slack };
        *slacks = slacks.saturating_add(slack(shard));
    }
    // The others keep their room, up to half of all: so the shard will not be back soon.
    let half = gaps[ALL] / 2;
    let mut small_kept = small_slack.min(if mine_is_large { gaps[SMALL] } else { gaps[SMALL] / 2 });
    let mut large_kept = large_slack.min(gaps[LARGE]);
    let kept = Scale::new(half, small_kept.saturating_add(large_kept));
    (small_kept, large_kept) = (kept.of(small_kept), kept.of(large_kept));
    let (small, large) = (Scale::new(small_kept, small_slack), Scale::new(large_kept, large_slack));
    let pool = if mine_is_large { gaps[LARGE] } else { gaps[SMALL] - small_kept };
    let all = gaps[ALL] - small_kept - large_kept;
    mine.set_ceiling(quantity, mine.live(quantity).saturating_add(pool.min(all)));
    for (is_large, shard) in shards {
        let scale = if is_large { large } else { small };
        let left = shard.ceiling(quantity).saturating_sub(shard.live(quantity));
        // A shard without slack keeps none; one above its ceiling is about to reconcile itself, and
        // gets what it uses.
        if left != 0 && !(scale.is_identity() && left > 0) && !std::ptr::eq(shard, mine) {
            shard.set_ceiling(quantity, shard.live(quantity).saturating_add(scale.of(left.max(0))));
        }
    }
}

/// Flows in and out, by quantity.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    came: [u64; QUANTITIES],
    went: [u64; QUANTITIES],
}

impl Books {
    /// The live and the active amount of `quantity`, from `small` in the shards of small blocks and
    /// `large` in that of the large.
    #[inline(always)]
    fn now(&self, quantity: usize, small: i64, large: i64) -> (ByPool, ByPool) {
        let waiting = self.pending.map(|pool| pool[quantity]);
        let live = [small + large, small, large];
        let active = [
            live[ALL] + waiting[0] + waiting[1],
            live[SMALL] + waiting[0],
            live[LARGE] + waiting[1],
        ];
        (live, active)
    }

    /// Reconciles the shard `mine`, which passed a ceiling. `shards` are all shards ever used;
    /// `highest` is the peak of live bytes that no reset lowers.
    pub fn reconcile<'a>(
        &mut self,
        highest: &AtomicU64,
        shards: impl Iterator<Item = Member<'a>> + Clone,
        mine: &'a ShardTotals,
    ) {
        // Most programs have few, walked many times here: copied into a row of their own.
        let mut few = [(false, mine); FEW_SHARDS];
        let mut count = 0;
        for member in shards.clone() {
            let Some(place) = few.get_mut(count) else {
                return self.reconcile_until_within(highest, shards, mine, true);
            };
            *place = member;
            count += 1;
        }
        self.reconcile_until_within(highest, few[..count].iter().copied(), mine, false);
    }

    /// See [`Books::reconcile`]; `many`: more shards than [`FEW_SHARDS`].
    #[inline(always)]
    fn reconcile_until_within<'a>(
        &mut self,
        highest: &AtomicU64,
        shards: impl Iterator<Item = Member<'a>> + Clone,
        mine: &ShardTotals,
        many: bool,
    ) {
        // Once, unless another shard passed a ceiling while we lowered it.
        for _ in 0..4 {
            let passed =
                std::array::from_fn(|quantity| mine.live(quantity) > mine.ceiling(quantity));
            if !many || !self.make_room(passed, shards.clone(), mine) {
                self.reconcile_passed(passed, highest, shards.clone(), mine);
            }
            // Orders our stores of ceilings before the loads of live amounts.
            fence(Ordering::SeqCst);
            if shards.clone().all(|(_, shard)| shard.is_within()) {
                return;
            }
        }
    }

    /// Raises the ceilings that the shard `mine` has `passed`: first by room that no shard has,
    /// then by room that others do not use, half of it if that suffices. False: all of it is too
    /// little.
    fn make_room<'a>(
        &self,
        passed: [bool; QUANTITIES],
        shards: impl Iterator<Item = Member<'a>> + Clone,
        mine: &ShardTotals,
    ) -> bool {
        let mut ceilings = [[0i64; QUANTITIES]; 2];
        let mut pool = SMALL;
        for (is_large, shard) in shards.clone() {
            for (quantity, sum) in ceilings[usize::from(is_large)].iter_mut().enumerate() {
                *sum = sum.wrapping_add(shard.ceiling(quantity));
            }
            if is_large && std::ptr::eq(shard, mine) {
                pool = LARGE;
            }
        }
        for quantity in (0..QUANTITIES).filter(|&quantity| passed[quantity]) {
            let needed = mine.live(quantity) - mine.ceiling(quantity);
            // As if every shard were at its ceiling.
            let mut room = self.gaps(quantity, ceilings[0][quantity], ceilings[1][quantity]);
            for (is_large, shard) in shards.clone() {
                let lacking = needed - room[pool].min(room[ALL]);
                if lacking <= 0 {
                    break;
                }
                let of = if is_large { LARGE } else { SMALL };
                let slack = shard.ceiling(quantity) - shard.live(quantity);
                // Room of the other pool's shards helps only if both together lack it.
                if slack <= 0 || std::ptr::eq(shard, mine) || of != pool && room[ALL] >= needed {
                    continue;
                }
                let taken = lacking.max(slack / 2).min(slack);
                shard.set_ceiling(quantity, shard.ceiling(quantity) - taken);
                room[ALL] += taken;
                room[of] += taken;
            }
            let room = room[pool].min(room[ALL]);
            if room < needed {
                return false;
            }
            mine.set_ceiling(quantity, mine.ceiling(quantity) + room);
        }
        true
    }

    /// The room between the amounts of a quantity (`small` in the shards of small blocks, `large`
    /// in that of the large) and its peaks, by pool.
    #[inline(always)]
    fn gaps(&self, quantity: usize, small: i64, large: i64) -> ByPool {
        let (live, active) = self.now(quantity, small, large);
        std::array::from_fn(|pool| {
            (self.live[quantity][pool] - live[pool]).min(self.active[quantity][pool] - active[pool])
        })
    }

    /// Takes all sums, and new peaks from them; as if the first shard had passed all its ceilings.
    pub fn reconcile_all<'a>(
        &mut self,
        highest: &AtomicU64,
        shards: impl Iterator<Item = Member<'a>> + Clone,
    ) {
        if let Some((_, any)) = shards.clone().next() {
            self.reconcile_passed([true; QUANTITIES], highest, shards.clone(), any);
            self.reconcile(highest, shards, any);
        }
    }

    /// Reconciles the quantities whose ceilings the shard `mine` has `passed`. Each has code of its
    /// own, without a loop: a growing program comes here at every malloc.
    fn reconcile_passed<'a>(
        &mut self,
        passed: [bool; QUANTITIES],
        highest: &AtomicU64,
        shards: impl Iterator<Item = Member<'a>> + Clone,
        mine: &ShardTotals,
    ) {
        let mut sums = [[0i64; QUANTITIES]; 2];
        for (is_large, shard) in shards.clone() {
            let [bytes, blocks, requested] = &mut sums[usize::from(is_large)];
            *bytes = bytes.wrapping_add(shard.live(BYTES));
            *blocks = blocks.wrapping_add(shard.live(BLOCKS));
            *requested = requested.wrapping_add(shard.live(REQUESTED));
        }
        let gaps = [
            passed[BYTES].then(|| self.raise::<BYTES>(&sums)),
            passed[BLOCKS].then(|| self.raise::<BLOCKS>(&sums)),
            passed[REQUESTED].then(|| self.raise::<REQUESTED>(&sums)),
        ];
        let live = sums[0][BYTES].wrapping_add(sums[1][BYTES]);
        if passed[BYTES] && live > highest.load(Ordering::Relaxed) as i64 {
            highest.store(live as u64, Ordering::Relaxed);
        }
        let at_peak = gaps.map(|gaps| gaps.is_some_and(|gaps| gaps[ALL] == 0));
        for (quantity, gaps) in gaps.into_iter().enumerate() {
            if let Some(gaps) = gaps.filter(|gaps| gaps[ALL] != 0) {
                redistribute(quantity, gaps, shards.clone(), mine);
            }
        }
        if at_peak == [false; QUANTITIES] {
            return;
        }
        // A new peak.
        let level = |shard: &ShardTotals, quantity: usize| {
            if at_peak[quantity] {
                shard.set_ceiling(quantity, shard.live(quantity));
            }
        };
        for (_, shard) in shards {
            level(shard, BYTES);
            level(shard, BLOCKS);
            level(shard, REQUESTED);
        }
    }

    /// Raises the peaks of a quantity to `sums` (in the shards of small blocks and in that of the
    /// large); returns the room left, by pool.
    #[inline(always)]
    fn raise<const QUANTITY: usize>(&mut self, sums: &[[i64; QUANTITIES]; 2]) -> ByPool {
        let (live, active) = self.now(QUANTITY, sums[0][QUANTITY], sums[1][QUANTITY]);
        std::array::from_fn(|pool| {
            let (live_peak, active_peak) =
                (&mut self.live[QUANTITY][pool], &mut self.active[QUANTITY][pool]);
            *live_peak = live[pool].max(*live_peak);
            *active_peak = active[pool].max(*active_peak);
            (*live_peak - live[pool]).min(*active_peak - active[pool])
        })
    }

    /// A freed block of `shard` begins to wait: still active, but no longer counted by its shard.
    pub fn begin_wait(&mut self, shard: &ShardTotals, large: bool, amounts: Amounts) {
        for (quantity, amount) in amounts.into_iter().enumerate() {
            self.pending[usize::from(large)][quantity] += amount;
            shard.set_ceiling(quantity, shard.ceiling(quantity).saturating_sub(amount));
        }
    }

    /// The wait of a block has ended.
    pub fn end_wait(&mut self, large: bool, amounts: Amounts) {
        for (quantity, amount) in amounts.into_iter().enumerate() {
            self.pending[usize::from(large)][quantity] -= amount;
        }
    }

    /// Restarts all peaks at the current amounts.
    pub fn reset_peaks<'a>(
        &mut self,
        highest: &AtomicU64,
        shards: impl Iterator<Item = Member<'a>> + Clone,
    ) {
        (self.live, self.active) = Default::default();
        self.reconcile_all(highest, shards);
    }

    /// Restarts the flows at 0. `counts` are those of small and large blocks.
    pub fn reset_accumulated(&mut self, counts: &[BlockCounts; 2]) {
        self.base = [self.flows(counts, false), self.flows(counts, true)];
    }

    /// Flows of live or of active blocks since the beginning.
    fn flows(&self, counts: &[BlockCounts; 2], active: bool) -> [Flow; 2] {
        let flow = |pool: usize| {
            let c = &counts[pool];
            let (mut came, mut went) = ([0; QUANTITIES], [0; QUANTITIES]);
            (came[BYTES], went[BYTES]) = (c.malloc_bytes, c.free_bytes);
            (came[BLOCKS], went[BLOCKS]) = (c.mallocs, c.frees);
            (came[REQUESTED], went[REQUESTED]) = (c.malloc_requested, c.free_requested);
            if active {
                for (went, waiting) in went.iter_mut().zip(self.pending[pool]) {
                    *went = went.wrapping_sub(waiting as u64);
                }
            }
            Flow { came, went }
        };
        [flow(0), flow(1)]
    }

    /// All numbers for a reader; the peaks must be reconciled. `counts` are those of small and
    /// large blocks.
    pub fn stats(&self, counts: &[BlockCounts; 2]) -> BlockStats {
        let stat = |quantity: usize, active: bool| {
            let flows = self.flows(counts, active);
            let base = &self.base[usize::from(active)];
            let peaks = if active { &self.active } else { &self.live };
            let pool = |at: usize| Stat {
                current: flows[at].came[quantity].wrapping_sub(flows[at].went[quantity]),
                peak: 0,
                allocated: flows[at].came[quantity].wrapping_sub(base[at].came[quantity]),
                freed: flows[at].went[quantity].wrapping_sub(base[at].went[quantity]),
            };
            let (small, large) = (pool(0), pool(1));
            let all = Stat {
                current: small.current.wrapping_add(large.current),
                peak: 0,
                allocated: small.allocated.wrapping_add(large.allocated),
                freed: small.freed.wrapping_add(large.freed),
            };
            let mut stats = [all, small, large];
            for (stat, &peak) in stats.iter_mut().zip(&peaks[quantity]) {
                // Other threads go on meanwhile: the current amount is never above its peak.
                stat.peak = (peak.max(0) as u64).max(stat.current);
            }
            stats
        };
        BlockStats {
            allocation: stat(BLOCKS, false),
            allocated_bytes: stat(BYTES, false),
            active: stat(BLOCKS, true),
            active_bytes: stat(BYTES, true),
            requested_bytes: stat(REQUESTED, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Five shards, the last that of the large blocks, and the knowledge of an allocator that looks
    /// at every block.
    #[derive(Default)]
    struct Model {
        shards: [ShardTotals; 5],
        books: Books,
        highest: AtomicU64,
        /// Shard, is it large, amounts.
        live: Vec<(usize, bool, Amounts)>,
        waiting: Vec<(bool, Amounts)>,
        live_peak: [ByPool; QUANTITIES],
        active_peak: [ByPool; QUANTITIES],
        highest_bytes: i64,
        reconciled: u32,
    }

    impl Model {
        fn reconcile(&mut self, mine: usize) {
            let members =
                self.shards.iter().enumerate().map(|(number, shard)| (number == 4, shard));
            self.books.reconcile(&self.highest, members, &self.shards[mine]);
            self.reconciled += 1;
        }

        fn insert(&mut self, shard: usize, amounts: Amounts) {
            let large = shard == 4;
            let over = self.shards[shard].add(amounts[BYTES] as u64, amounts[REQUESTED] as u64);
            if over {
                self.reconcile(shard);
            }
            self.live.push((shard, large, amounts));
        }

        fn free(&mut self, at: usize, waits: bool) {
            let (shard, large, amounts) = self.live.swap_remove(at);
            let _ = self.shards[shard].sub(amounts[BYTES] as u64, amounts[REQUESTED] as u64);
            if waits {
                self.books.begin_wait(&self.shards[shard], large, amounts);
                self.waiting.push((large, amounts));
            }
        }

        fn end_wait(&mut self, at: usize) {
            let (large, amounts) = self.waiting.swap_remove(at);
            self.books.end_wait(large, amounts);
        }

        fn note(&mut self, reset: bool) {
            for q in 0..QUANTITIES {
                let live =
                    |large| self.live.iter().filter(|b| b.1 == large).map(|b| b.2[q]).sum::<i64>();
                let wait = |large| {
                    self.waiting.iter().filter(|b| b.0 == large).map(|b| b.1[q]).sum::<i64>()
                };
                let live = [live(false), live(true)];
                let active = [live[0] + wait(false), live[1] + wait(true)];
                for (peaks, [small, large]) in
                    [(&mut self.live_peak, live), (&mut self.active_peak, active)]
                {
                    for (peak, now) in peaks[q].iter_mut().zip([small + large, small, large]) {
                        *peak = if reset { now } else { now.max(*peak) };
                    }
                }
            }
            self.highest_bytes =
                self.highest_bytes.max(self.live.iter().map(|block| block.2[BYTES]).sum());
        }

        fn check(&self) {
            assert_eq!(self.books.live, self.live_peak);
            assert_eq!(self.books.active, self.active_peak);
            assert_eq!(self.highest.load(Ordering::Relaxed) as i64, self.highest_bytes);
            for q in 0..QUANTITIES {
                let ceilings: i64 = self.shards.iter().map(|shard| shard.ceiling(q)).sum();
                let waiting: i64 = self.waiting.iter().map(|block| block.1[q]).sum();
                assert!(ceilings <= self.live_peak[q][ALL], "ceilings of {q} above the peak");
                assert!(
                    ceilings + waiting <= self.active_peak[q][ALL],
                    "ceilings of {q} above the active peak"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn every_peak_is_exact_whatever_shards_do_in_turn(
            calls in proptest::collection::vec((0usize..5, 1u64..100, 0u8..13), 1..300),
        ) {
            let mut model = Model::default();
            for (shard, size, what) in calls {
                let at = |length: usize| size as usize % length;
                match what {
                    0..=6 => {
                        let unit = if shard == 4 { 1 << 20 } else { 512 };
                        let bytes = size * unit;
                        model.insert(shard, amounts(bytes, bytes - size % 7 * unit / 8));
                    }
                    7..=9 if !model.live.is_empty() => model.free(at(model.live.len()), what == 9),
                    10 if !model.waiting.is_empty() => model.end_wait(at(model.waiting.len())),
                    11 if size < 10 => {
                        let members =
                            model.shards.iter().enumerate().map(|(n, shard)| (n == 4, shard));
                        model.books.reset_peaks(&model.highest, members);
                        model.note(true);
                    }
                    _ => {}
                }
                model.note(false);
                model.check();
            }
        }
    }

    #[test]
    fn a_program_that_comes_back_to_its_old_peak_does_not_reconcile() {
        let mut model = Model::default();
        for step in 0..3 {
            let before = model.reconciled;
            (0..100).for_each(|block| model.insert(0, amounts(512 * (1 + block % 3), 512)));
            assert_eq!(model.reconciled > before, step == 0, "step {step}");
            (0..100).for_each(|_| model.free(0, false));
        }
    }

    #[test]
    fn what_is_accumulated_begins_again_and_what_is_there_stays() {
        let mut books = Books::default();
        let count = |mallocs: u64, frees: u64| BlockCounts {
            mallocs,
            malloc_bytes: mallocs * 512,
            malloc_requested: mallocs * 500,
            frees,
            free_bytes: frees * 512,
            free_requested: frees * 500,
            ..BlockCounts::default()
        };
        books.reset_accumulated(&[count(10, 4), count(3, 0)]);
        let stats = books.stats(&[count(15, 6), count(4, 1)]);
        let expected =
            |current, allocated, freed| Stat { current, peak: current, allocated, freed };
        assert_eq!(stats.allocation, [expected(12, 6, 3), expected(9, 5, 2), expected(3, 1, 1)]);
        assert_eq!(stats.active, stats.allocation, "nothing waits");
        assert_eq!(stats.requested_bytes[SMALL], expected(9 * 500, 5 * 500, 2 * 500));
    }
}
