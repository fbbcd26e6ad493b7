//! Pools: memory with rules of its own for serving, keeping and returning it.
//!
//! A [`Pool`] is spaces in its device's arenas, a shard for its small blocks, and [`Rules`]. A
//! device's ordinary memory is four pools, one a lifetime, with their small blocks in the shards of
//! streams. A [named pool](named) is one pool; the private memory of CUDA graphs is one for each
//! pool id of torch's ([`capture`] finds which). All lie behind the central lock, and every
//! operation treats all alike: a new mode is new rules, or a new [`Purpose`].

pub(crate) mod blocks;
pub(crate) mod capture;
pub(crate) mod graphs;
pub(crate) mod key;
pub(crate) mod named;
pub(crate) mod outside;
pub(crate) mod restore;
pub(crate) mod route;

use crate::lifetime::{LIFETIMES, Lifetime};
use crate::runs::arena::SpaceId;
use crate::runs::spaces::Spaces;
use crate::small::shard::{SHARDS, Shard};
use gruyere_record::gauges::SMALL_LIMIT;
use std::collections::BTreeMap;

/// The number of a pool on its device. From [`FIRST_CAPTURE`] on it is also the number under which
/// the page table names the pool's shard.
pub(crate) type PoolNumber = u32;
/// Ordinary memory has one pool a lifetime, with the lifetime's number; below this, the shards that
/// the page table names belong to streams.
const FIRST_CAPTURE: PoolNumber = SHARDS as PoolNumber;
/// Named pools have the numbers from here on, never used again.
pub(crate) const FIRST_NAMED: PoolNumber = 1 << 27;

/// The pool number of the captures' pool `number` ([`capture::Captures`]).
pub(crate) const fn of_capture(number: u32) -> PoolNumber {
    FIRST_CAPTURE + number
}

/// The reverse: the number among captures, if the pool is one of theirs.
pub(crate) fn capture_of(number: PoolNumber) -> Option<u32> {
    number.checked_sub(FIRST_CAPTURE).filter(|_| number < FIRST_NAMED)
}

/// The tag under which the record counts a pool's blocks: captures from 1 on, all others 0.
pub(crate) fn capture_tag(number: PoolNumber) -> u8 {
    capture_of(number).map_or(0, |number| u8::try_from(number + 1).unwrap_or(u8::MAX))
}

/// The streams that may reuse a pool's memory once a block of it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// Its own stream, and every other that an event shows to be past it. The reclaim ladder may
    /// take idle memory above the reserve.
    Shared,
    /// Its own stream alone until the pool is over: graphs replay on streams that the allocator
    /// does not learn of.
    Private,
    /// None: the end of its uses is unknown.
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Supply,
    /// The pool's maker brings it in whole segments and takes it back: it never moves, and no other
    /// pool gets it. Small blocks lie in segments of their own.
    Outside {
        /// Whether several blocks may lie in one segment.
        split: bool,
    },
}

/// The rules of a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Bytes that the pool keeps even if idle.
    pub(crate) reserve: u64,
    /// Ceiling on the pool's live bytes.
    pub(crate) limit: Option<u64>,
    pub(crate) reuse: Reuse,
    pub(crate) source: Source,
}

impl Rules {
    pub(crate) const fn new(reuse: Reuse) -> Self {
        Self { reserve: 0, limit: None, reuse, source: Source::Supply }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The ordinary memory of a lifetime.
    Ordinary(Lifetime),
    /// A pool made by the program, with its name.
    Named(String),
    Capture,
}

pub(crate) struct Pool {
    pub(crate) purpose: Purpose,
    pub(crate) rules: Rules,
    /// The spaces of its runs; the reserve is in the first.
    spaces: Vec<SpaceId>,
    /// Its small blocks; `None`: they lie in the shards of streams.
    pub(crate) shard: Option<Shard>,
    /// Blocks not freed by the program yet; not counted in ordinary memory.
    pub(crate) live: u64,
    /// Their bytes, each block rounded up to 512 B.
    pub(crate) live_bytes: u64,
    /// Blocks served so far.
    pub(crate) served: u64,
    /// Threads that are finding memory for it outside the central lock.
    pub(crate) busy: u32,
}

impl Pool {
    fn new(purpose: Purpose, rules: Rules, spaces: Vec<SpaceId>, shard: Option<Shard>) -> Self {
        Self { purpose, rules, spaces, shard, live: 0, live_bytes: 0, served: 0, busy: 0 }
    }

    /// The space of its reserve and of its large blocks.
    pub(crate) fn space(&self) -> SpaceId {
        self.spaces[0]
    }

    pub(crate) fn spaces(&self) -> &[SpaceId] {
        &self.spaces
    }

    /// The space of a block of `size` bytes, in a pool with outside segments.
    pub(crate) fn space_of_size(&self, size: u64) -> SpaceId {
        let small = self.spaces.get(1).filter(|_| size <= SMALL_LIMIT);
        small.copied().unwrap_or(self.space())
    }

    pub(crate) fn is_outside(&self) -> bool {
        self.rules.source != Source::Supply
    }

    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(self.purpose, Purpose::Ordinary(_))
    }

    /// The program's name for it, if the program made it.
    pub(crate) fn name(&self) -> Option<&str> {
        match &self.purpose {
            Purpose::Named(name) => Some(name),
            Purpose::Ordinary(_) | Purpose::Capture => None,
        }
    }

    /// Counts a new block of `bytes`.
    pub(crate) fn note_malloc(&mut self, bytes: u64) {
        self.live += 1;
        self.live_bytes += bytes;
        self.served += 1;
    }

    /// Counts a block of `bytes` freed by the program.
    pub(crate) fn note_free(&mut self, bytes: u64) {
        self.live -= 1;
        self.live_bytes -= bytes;
    }
}

const NO_POOL: PoolNumber = PoolNumber::MAX;

pub(crate) struct Pools {
    pools: BTreeMap<PoolNumber, Pool>,
    /// The pool of each space.
    by_space: Vec<PoolNumber>,
    /// Pools other than ordinary memory.
    apart: usize,
    /// Named pools made so far.
    named: u32,
}

impl Pools {
    pub(crate) fn new(spaces: &Spaces) -> Self {
        let mut pools = Self { pools: BTreeMap::new(), by_space: Vec::new(), apart: 0, named: 0 };
        for lifetime in Lifetime::ALL {
            let purpose = Purpose::Ordinary(lifetime);
            let spaces = spaces.of_lifetime(lifetime).collect();
            let pool = Pool::new(purpose, Rules::new(Reuse::Shared), spaces, None);
            pools.insert(lifetime as PoolNumber, pool);
        }
        pools
    }

    fn insert(&mut self, number: PoolNumber, pool: Pool) {
        for &space in &pool.spaces {
            let at = space as usize;
            if at >= self.by_space.len() {
                self.by_space.resize(at + 1, NO_POOL);
            }
            self.by_space[at] = number;
        }
        self.pools.insert(number, pool);
    }

    /// Adds a pool with a shard of its own.
    pub(crate) fn add(
        &mut self,
        number: PoolNumber,
        purpose: Purpose,
        reuse: Reuse,
        space: SpaceId,
    ) {
        // Within a pool's single shard, no stream has enough bins to borrow from.
        let shard = Some(Shard::new(1));
        self.insert(number, Pool::new(purpose, Rules::new(reuse), vec![space], shard));
        self.apart += 1;
    }

    /// Adds a named pool in `space`; its number. `None`: the numbers are used up.
    pub(crate) fn add_named(&mut self, name: &str, space: SpaceId) -> Option<PoolNumber> {
        let number = self.named.checked_add(1).filter(|&number| number < FIRST_NAMED)?;
        self.named = number;
        self.add(FIRST_NAMED + number, Purpose::Named(name.to_owned()), Reuse::Shared, space);
        Some(FIRST_NAMED + number)
    }

    /// From now on a pool without memory gets it from outside; `small` is the new space of its
    /// small blocks. False: there is no such pool, or it has such a space already.
    pub(crate) fn open_to_outside(
        &mut self,
        number: PoolNumber,
        small: SpaceId,
        split: bool,
    ) -> bool {
        let Some(mut pool) = self.pools.remove(&number) else { return false };
        let is_new = !pool.is_outside();
        pool.rules.source = Source::Outside { split };
        if is_new {
            pool.spaces.push(small);
        }
        self.insert(number, pool);
        is_new
    }

    /// Removes a pool; the caller disposes of its spaces.
    pub(crate) fn remove(&mut self, number: PoolNumber) {
        let Some(pool) = self.pools.remove(&number) else { return };
        self.apart -= usize::from(!pool.is_ordinary());
        for space in pool.spaces {
            self.by_space[space as usize] = NO_POOL;
        }
    }

    /// Whether there are pools other than ordinary memory.
    #[inline]
    pub(crate) fn has_apart(&self) -> bool {
        self.apart > 0
    }

    pub(crate) fn get(&self, number: PoolNumber) -> Option<&Pool> {
        self.pools.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: PoolNumber) -> Option<&mut Pool> {
        self.pools.get_mut(&number)
    }

    /// A pool's own shard.
    pub(crate) fn shard_mut(&mut self, number: PoolNumber) -> Option<&mut Shard> {
        self.get_mut(number)?.shard.as_mut()
    }

    /// The pool of ordinary memory of a lifetime.
    pub(crate) fn ordinary_mut(&mut self, lifetime: Lifetime) -> Option<&mut Pool> {
        self.get_mut(lifetime as PoolNumber)
    }

    /// The named pool of that name, with memory from the supply.
    pub(crate) fn find(&self, name: &str) -> Option<PoolNumber> {
        self.iter()
            .find(|(_, pool)| !pool.is_outside() && pool.name() == Some(name))
            .map(|(number, _)| number)
    }

    fn number_of(&self, space: SpaceId) -> PoolNumber {
        self.by_space.get(space as usize).copied().unwrap_or(NO_POOL)
    }

    pub(crate) fn of_space(&self, space: SpaceId) -> Option<&Pool> {
        self.get(self.number_of(space))
    }

    pub(crate) fn of_space_mut(&mut self, space: SpaceId) -> Option<&mut Pool> {
        self.get_mut(self.number_of(space))
    }

    /// All pools: ordinary memory, captures, named pools.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PoolNumber, &Pool)> {
        self.pools.iter().map(|(&number, pool)| (number, pool))
    }

    /// The shards of pools with a shard of their own.
    pub(crate) fn shards(&self) -> impl Iterator<Item = (PoolNumber, &Shard)> {
        self.iter().filter_map(|(number, pool)| Some((number, pool.shard.as_ref()?)))
    }

    /// The spaces of pools that streams share.
    pub(crate) fn shared_spaces(&self) -> impl Iterator<Item = SpaceId> {
        let shared = self.pools.values().filter(|pool| pool.rules.reuse == Reuse::Shared);
        shared.flat_map(|pool| pool.spaces.iter().copied())
    }

    /// The reserve of each lifetime of ordinary memory.
    pub(crate) fn reserves(&self) -> [u64; LIFETIMES] {
        Lifetime::ALL
            .map(|lifetime| self.get(lifetime as PoolNumber).map_or(0, |pool| pool.rules.reserve))
    }

    /// Drops the reserves of ordinary memory.
    pub(crate) fn drop_reserves(&mut self) {
        for lifetime in Lifetime::ALL {
            if let Some(pool) = self.ordinary_mut(lifetime) {
                pool.rules.reserve = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::arena::Arenas;

    fn spaces() -> Spaces {
        Spaces::new(&mut Arenas::default(), true)
    }

    fn pools() -> Pools {
        Pools::new(&spaces())
    }

    #[test]
    fn every_ordinary_space_is_of_one_lifetime() {
        let (spaces, pools) = (spaces(), pools());
        for lifetime in Lifetime::ALL {
            assert_eq!(spaces.of_lifetime(lifetime).count(), 3);
            for space in spaces.of_lifetime(lifetime) {
                assert_eq!(
                    pools.of_space(space).map(|pool| &pool.purpose),
                    Some(&Purpose::Ordinary(lifetime))
                );
            }
        }
        assert!(pools.of_space(SpaceId::MAX).is_none());
    }

    #[test]
    fn numbers_of_named_pools_are_never_used_again() {
        let mut pools = pools();
        let first = FIRST_NAMED + 1;
        assert_eq!(
            (pools.add_named("a", 14), pools.add_named("b", 15)),
            (Some(first), Some(first + 1))
        );
        pools.remove(first + 1);
        assert!(pools.get(first + 1).is_none());
        assert_eq!(pools.add_named("b", 15), Some(first + 2));
        assert_eq!((pools.find("b"), pools.find("c")), (Some(first + 2), None));
        pools.named = FIRST_NAMED - 1;
        assert_eq!(pools.add_named("d", 16), None);
    }

    #[test]
    fn a_space_is_its_pools_until_the_pool_is_forgotten() {
        let mut pools = pools();
        assert!(!pools.has_apart());
        pools.add(of_capture(3), Purpose::Capture, Reuse::Private, 20);
        assert!(
            pools.has_apart()
                && pools.of_space(20).is_some_and(|pool| pool.purpose == Purpose::Capture)
        );
        assert_eq!(pools.shared_spaces().count(), 3 * LIFETIMES, "a capture's is nobody else's");
        pools.remove(of_capture(3));
        assert!(!pools.has_apart() && pools.of_space(20).is_none() && pools.of_space(21).is_none());
        for lifetime in Lifetime::ALL {
            let ordinary = |pool: &Pool| pool.purpose == Purpose::Ordinary(lifetime);
            assert!(pools.of_space(lifetime as SpaceId).is_some_and(ordinary));
        }
    }

    #[test]
    fn the_record_counts_captures_alone() {
        assert_eq!([0, 3, FIRST_NAMED, FIRST_NAMED + 7].map(capture_tag), [0; 4]);
        assert_eq!(
            [of_capture(0), of_capture(253), of_capture(1000)].map(capture_tag),
            [1, 254, 255]
        );
    }
}
