//! Captures: the private memory of CUDA graphs.
//!
//! Blocks of a capture come from the private space of their pool id, and go back there: reuse inside is same-stream only, and
//! nobody else ever gets them before the pool is released, its blocks are freed, and the device has been synchronised after
//! both (replays run on streams that nobody tells us of). One pool id may serve several captures; they are counted.
#![deny(unsafe_code)]

use super::arena::SpaceId;
use super::lane::Lane;

/// torch's `MempoolId_t`.
pub type PoolId = (u64, u64);

/// The private memory of one pool id.
pub struct CapturePool {
    /// torch's id; `None`: a capture that no hook announced.
    pub id: Option<PoolId>,
    /// The driver's ids of the captures that allocate from it.
    pub captures: Vec<u64>,
    /// Begun and not ended.
    pub open: u32,
    /// Begun and not released.
    pub uses: u32,
    /// Times it was begun.
    pub begun: u64,
    /// Nothing in it is ever reused: without the hooks, nobody tells when the graph is gone.
    pub frozen: bool,
    /// Blocks that the program has not freed.
    pub live: u64,
    /// Its small blocks.
    pub lane: Lane,
    /// Its runs.
    pub space: SpaceId,
}

impl CapturePool {
    /// A pool in a private space.
    pub fn new(id: Option<PoolId>, space: SpaceId) -> Self {
        let frozen = id.is_none();
        Self {
            id,
            captures: Vec::new(),
            open: 0,
            uses: 0,
            begun: 0,
            frozen,
            live: 0,
            lane: Lane::new(1),
            space,
        }
    }

    /// Whether its memory may go to others once the device has been synchronised.
    pub fn is_over(&self) -> bool {
        !self.frozen && self.uses == 0 && self.open == 0 && self.live == 0
    }
}

/// The capture pools of a device, and the brackets that are open.
#[derive(Default)]
pub struct Captures {
    /// By number; `None`: free for another.
    pub pools: Vec<Option<CapturePool>>,
    /// Pools of the open begin/end brackets, oldest first, with the capture each was matched to.
    brackets: Vec<(u32, Option<u64>)>,
}

impl Captures {
    /// The number of pool `id`.
    pub fn find(&self, id: PoolId) -> Option<u32> {
        self.pools
            .iter()
            .position(|pool| pool.as_ref().is_some_and(|pool| pool.id == Some(id)))
            .map(|at| at as u32)
    }

    /// Adds a pool; its number.
    pub fn add(&mut self, pool: CapturePool) -> u32 {
        match self.pools.iter().position(Option::is_none) {
            Some(at) => {
                self.pools[at] = Some(pool);
                at as u32
            }
            None => {
                self.pools.push(Some(pool));
                self.pools.len() as u32 - 1
            }
        }
    }

    /// A pool.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut CapturePool> {
        self.pools.get_mut(number as usize)?.as_mut()
    }

    /// Opens a bracket.
    pub fn open(&mut self, number: u32) {
        self.brackets.push((number, None));
        if let Some(pool) = self.get_mut(number) {
            pool.open += 1;
            pool.uses += 1;
            pool.begun += 1;
        }
    }

    /// Closes the latest bracket of a pool. False: none is open.
    pub fn close(&mut self, number: u32) -> bool {
        let Some(at) = self.brackets.iter().rposition(|bracket| bracket.0 == number) else { return false };
        self.brackets.remove(at);
        if let Some(pool) = self.get_mut(number) {
            pool.open = pool.open.saturating_sub(1);
        }
        true
    }

    /// Brackets open now.
    pub fn open_brackets(&self) -> usize {
        self.brackets.len()
    }

    /// The pool from which `capture` allocates: the bracket that was matched to it before, else the latest one without a match.
    /// `None`: no hook announced it.
    pub fn matched(&mut self, capture: u64) -> Option<u32> {
        let known = self.brackets.iter().rposition(|bracket| bracket.1 == Some(capture));
        if let Some(at) = known.or_else(|| self.brackets.iter().rposition(|bracket| bracket.1.is_none())) {
            let number = self.brackets[at].0;
            self.brackets[at].1 = Some(capture);
            if let Some(pool) = self.get_mut(number)
                && !pool.captures.contains(&capture)
            {
                pool.captures.push(capture);
            }
            return Some(number);
        }
        let unannounced = |pool: &CapturePool| pool.id.is_none() && pool.captures.contains(&capture);
        self.pools.iter().position(|pool| pool.as_ref().is_some_and(unannounced)).map(|at| at as u32)
    }

    /// The pools that are over, and how often each was begun: one that is over before a synchronisation and after it, and was
    /// not begun between, has no replay in flight.
    pub fn over(&self) -> Vec<(u32, u64)> {
        let numbered = self.pools.iter().enumerate();
        numbered
            .filter_map(|(at, pool)| {
                pool.as_ref().filter(|pool| pool.is_over()).map(|pool| (at as u32, pool.begun))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captures() -> Captures {
        let mut captures = Captures::default();
        for id in [1, 2] {
            captures.add(CapturePool::new(Some((0, id)), 0));
        }
        captures
    }

    #[test]
    fn a_capture_keeps_the_pool_of_its_first_allocation() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(captures.matched(77), Some(0));
        captures.open(1);
        assert_eq!(captures.matched(88), Some(1));
        assert_eq!(captures.matched(77), Some(0));
        assert!(captures.close(0) && captures.close(1) && !captures.close(1));
    }

    #[test]
    fn a_pool_is_over_when_released_as_often_as_begun_and_empty() {
        let mut captures = captures();
        for _ in 0..2 {
            captures.open(0);
            assert!(captures.close(0));
        }
        let pool = captures.get_mut(0).unwrap();
        pool.live = 1;
        pool.uses -= 1;
        assert!(!pool.is_over());
        pool.uses -= 1;
        assert!(!pool.is_over());
        pool.live = 0;
        assert!(pool.is_over());
        assert_eq!(captures.over(), [(0, 2), (1, 0)]);
    }
}
