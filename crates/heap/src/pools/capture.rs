//! Captures: the private pool that each CUDA graph's blocks come from.
//!
//! The blocks of a capture come from the pool of its pool id and return there
//! ([`Reuse::Private`](super::Reuse::Private)). No other pool gets them before the pool is
//! released, its blocks are freed, and the device has been synchronised after both: replays run on
//! streams that the allocator does not learn of. One pool id may serve several captures; they are
//! counted.
//!
//! The hooks name a pool, the driver names a capture, and neither links the two. Each capture
//! begins inside a pool scope of its own, so with one scope that has no capture yet the match is
//! certain. With several, the capture gets a fresh pool tied to every pool that it could belong to:
//! a wrong guess would share memory between graphs that replay side by side.

use std::thread::{self, ThreadId};

/// torch's `MempoolId_t`.
pub type PoolId = (u64, u64);

/// The state of a stream that does not simply run its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capturing {
    /// In the capture with this id of the driver's.
    Id(u64),
    /// In a failed capture that waits for its end; the driver does not name it.
    Invalidated,
    /// The driver cannot say whether it captures.
    Unclear,
}

/// Set in the key of a stream with a failed capture; capture ids count up from 1.
const INVALIDATED: u64 = 1 << 63;

/// The users of the private memory of one pool id, or of captures without a known pool id.
#[derive(Default)]
pub(crate) struct CapturePool {
    pub(crate) id: Option<PoolId>,
    /// Without an id: the pools that its captures may belong to. It is not over before them.
    pub(crate) ties: Vec<PoolId>,
    /// The driver's ids of the running captures that allocate from it.
    pub(crate) captures: Vec<u64>,
    pub(crate) open: u32,
    pub(crate) uses: u32,
    /// Changes when its memory goes to others; older states are then of no use.
    pub(crate) era: u64,
    /// Grows with each pool scope: a pool that is over at the same version, with as many blocks
    /// served, has been over all the time.
    pub(crate) version: u64,
}

impl CapturePool {
    pub(crate) fn new(id: PoolId) -> Self {
        Self { id: Some(id), ..Self::default() }
    }

    fn is_released(&self) -> bool {
        self.uses == 0 && self.open == 0
    }
}

/// The source of a capture's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PoolMatch {
    Pool(u32),
    /// A new pool, tied to these.
    Tied(Vec<PoolId>),
    /// A new pool for memory that is never reused.
    Never,
}

/// A pool scope that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PoolScope {
    pool: u32,
    /// The capture matched to it.
    capture: Option<u64>,
    /// The thread that opened it and is to close it.
    thread: ThreadId,
}

/// The capture pools of a device, and its open pool scopes.
#[derive(Default)]
pub(crate) struct Captures {
    /// Pools by number; `None`: a number free for another pool.
    pools: Vec<Option<CapturePool>>,
    /// The open pool scopes, oldest first.
    scopes: Vec<PoolScope>,
    /// The pool of captures with an unknown pool: without the hooks, the allocator never learns
    /// that the graph is gone.
    never: Option<u32>,
    /// Eras so far, over all pools.
    eras: u64,
}

impl Captures {
    fn position(&self, is_it: impl Fn(&CapturePool) -> bool) -> Option<u32> {
        self.pools.iter().position(|pool| pool.as_ref().is_some_and(&is_it)).map(|at| at as u32)
    }

    pub(crate) fn find(&self, id: PoolId) -> Option<u32> {
        self.position(|pool| pool.id == Some(id))
    }

    /// Adds a pool; its number.
    pub(crate) fn add(&mut self, pool: CapturePool) -> u32 {
        self.eras += 1;
        let pool = CapturePool { era: self.eras, ..pool };
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

    /// The pool of memory that is never reused; its number.
    pub(crate) fn add_never(&mut self) -> u32 {
        let number = self.add(CapturePool::default());
        self.never = Some(number);
        number
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(place) = self.pools.get_mut(number as usize) {
            *place = None;
        }
    }

    /// All pools with an id of torch's.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, PoolId)> {
        self.pools.iter().enumerate().filter_map(|(at, pool)| Some((at as u32, pool.as_ref()?.id?)))
    }

    pub(crate) fn id(&self, number: u32) -> Option<PoolId> {
        self.pools.get(number as usize)?.as_ref()?.id
    }

    /// Notes that the memory of a pool goes to others.
    pub(crate) fn begin_era(&mut self, number: u32) {
        self.eras += 1;
        let era = self.eras;
        if let Some(pool) = self.get_mut(number) {
            pool.era = era;
        }
    }

    pub(crate) fn get(&self, number: u32) -> Option<&CapturePool> {
        self.pools.get(number as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut CapturePool> {
        self.pools.get_mut(number as usize)?.as_mut()
    }

    pub(crate) fn open(&mut self, number: u32) {
        self.scopes.push(PoolScope { pool: number, capture: None, thread: thread::current().id() });
        if let Some(pool) = self.get_mut(number) {
            pool.open += 1;
            pool.uses += 1;
            pool.version += 1;
        }
    }

    /// Closes a pool scope. False: none is open.
    ///
    /// Of two, a matched one goes first: one unmatched scope too many makes captures uncertain, one
    /// too few makes them wrong.
    pub(crate) fn close(&mut self, number: u32) -> bool {
        let mut own =
            (0..self.scopes.len()).rev().filter(|&at| self.scopes[at].pool == number).peekable();
        let latest = own.peek().copied();
        let Some(at) = own.find(|&at| self.scopes[at].capture.is_some()).or(latest) else {
            return false;
        };
        self.scopes.remove(at);
        self.closed(number);
        true
    }

    fn closed(&mut self, number: u32) {
        let Some(pool) = self.get_mut(number) else { return };
        pool.open = pool.open.saturating_sub(1);
        if pool.open == 0 {
            pool.captures.clear();
        }
        // Uncertain matches are due again: fewer pools remain possible.
        let id = pool.id;
        for pool in self.pools.iter_mut().flatten() {
            if id.is_some_and(|id| pool.ties.contains(&id)) {
                pool.captures.clear();
            }
        }
    }

    /// Whether this thread has left a matched pool scope open.
    pub(crate) fn has_own(&self) -> bool {
        let mine = thread::current().id();
        self.scopes.iter().any(|scope| scope.thread == mine && scope.capture.is_some())
    }

    /// Closes and releases the matched pool scopes of this thread; how many. Call only after
    /// finding that no stream captures.
    ///
    /// torch ends a capture by asking the driver for the graph, and throws at once if that fails (a
    /// forbidden call inside the capture): neither the end nor the release ever comes. The thread
    /// that began the capture is here now, so it is past that.
    pub(crate) fn forget_failed(&mut self) -> u32 {
        let mine = thread::current().id();
        let is_failed = |scope: &PoolScope| scope.thread == mine && scope.capture.is_some();
        let failed: Vec<u32> =
            self.scopes.iter().filter(|&scope| is_failed(scope)).map(|scope| scope.pool).collect();
        self.scopes.retain(|scope| !is_failed(scope));
        for &number in &failed {
            self.closed(number);
            if let Some(pool) = self.get_mut(number) {
                pool.uses = pool.uses.saturating_sub(1);
                pool.version += 1;
            }
        }
        failed.len() as u32
    }

    /// The pools of the open pool scopes, without a capture or all, each once.
    fn candidates(&self, unmatched: bool) -> Vec<u32> {
        let mut pools: Vec<u32> = self
            .scopes
            .iter()
            .filter(|scope| !unmatched || scope.capture.is_none())
            .map(|b| b.pool)
            .collect();
        pools.sort_unstable();
        pools.dedup();
        pools
    }

    /// The source of the blocks of `stream`, which is in state `capturing`. The caller hands a pool
    /// made for the answer to [`Captures::adopt`].
    pub(crate) fn matched(&mut self, capturing: Capturing, stream: u32) -> PoolMatch {
        let key = match capturing {
            Capturing::Id(id) => id,
            Capturing::Invalidated => INVALIDATED | u64::from(stream),
            Capturing::Unclear => return self.never(),
        };
        if let Some(number) = self.position(|pool| pool.captures.contains(&key)) {
            return PoolMatch::Pool(number);
        }
        let unmatched = self.candidates(true);
        if let (Capturing::Id(id), &[number]) = (capturing, unmatched.as_slice()) {
            self.assign(number, id);
            return PoolMatch::Pool(number);
        }
        // A failed capture may have been matched while its id was known; so may the other of two
        // scopes of one pool.
        let is_new = matches!(capturing, Capturing::Id(_)) && !unmatched.is_empty();
        let candidates = if is_new { unmatched } else { self.candidates(false) };
        match candidates.as_slice() {
            [] => self.never(),
            &[number] => PoolMatch::Pool(number),
            many => PoolMatch::Tied(
                many.iter().filter_map(|&at| self.pools[at as usize].as_ref()?.id).collect(),
            ),
        }
    }

    /// Notes that the blocks of `stream` come from pool `number`, made for an answer of
    /// [`Captures::matched`].
    pub(crate) fn adopt(&mut self, number: u32, capturing: Capturing, stream: u32) {
        let key = match capturing {
            Capturing::Id(id) => id,
            Capturing::Invalidated => INVALIDATED | u64::from(stream),
            Capturing::Unclear => return,
        };
        if self.never != Some(number)
            && let Some(pool) = self.get_mut(number)
        {
            pool.captures.push(key);
        }
    }

    /// One pool is enough for all memory that is never reused.
    fn never(&self) -> PoolMatch {
        self.never.map_or(PoolMatch::Never, PoolMatch::Pool)
    }

    fn assign(&mut self, number: u32, capture: u64) {
        if let Some(scope) =
            self.scopes.iter_mut().rev().find(|b| b.pool == number && b.capture.is_none())
        {
            scope.capture = Some(capture);
        }
        if let Some(pool) = self.get_mut(number) {
            pool.captures.push(capture);
        }
    }

    /// Whether an open pool scope has no capture yet.
    pub(crate) fn has_unmatched(&self) -> bool {
        self.scopes.iter().any(|scope| scope.capture.is_none())
    }

    /// Called before a pool scope opens, with the ids of the `running` captures: if only one match
    /// is left, makes it now, while it is certain.
    pub(crate) fn match_running(&mut self, running: &[u64]) {
        let known = |id: &u64| self.position(|pool| pool.captures.contains(id)).is_some();
        let mut unknown: Vec<u64> = running.iter().copied().filter(|id| !known(id)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if let (&[capture], &[number]) = (unknown.as_slice(), self.candidates(true).as_slice()) {
            self.assign(number, capture);
        }
    }

    /// Whether no graph uses a pool any more: once its blocks are freed and the device is
    /// synchronised, its memory may go to others.
    pub(crate) fn is_released(&self, number: u32) -> bool {
        let Some(pool) = self.pools.get(number as usize).and_then(Option::as_ref) else {
            return false;
        };
        let is_released = |id: &PoolId| {
            let pool = self.find(*id).and_then(|at| self.pools[at as usize].as_ref());
            pool.is_none_or(CapturePool::is_released)
        };
        self.never != Some(number) && pool.is_released() && pool.ties.iter().all(is_released)
    }

    /// The released pools, with their versions.
    pub(crate) fn released(&self) -> impl Iterator<Item = (u32, u64)> {
        let versions = self.pools.iter().enumerate();
        let versions = versions.filter_map(|(at, pool)| Some((at as u32, pool.as_ref()?.version)));
        versions.filter(|&(at, _)| self.is_released(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captures() -> Captures {
        let mut captures = Captures::default();
        for id in [1, 2] {
            captures.add(CapturePool::new((0, id)));
        }
        captures
    }

    fn found(captures: &mut Captures, id: u64) -> PoolMatch {
        captures.matched(Capturing::Id(id), 5)
    }

    #[test]
    fn a_capture_keeps_the_pool_of_its_first_allocation() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
        captures.open(1);
        assert_eq!(found(&mut captures, 88), PoolMatch::Pool(1));
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
        assert!(captures.close(0) && captures.close(1) && !captures.close(1));
        assert_eq!(found(&mut captures, 77), PoolMatch::Never);
    }

    #[test]
    fn a_capture_that_may_belong_to_two_pools_is_tied_to_both() {
        let mut captures = captures();
        captures.open(0);
        captures.open(1);
        let PoolMatch::Tied(ties) = found(&mut captures, 77) else { panic!("a guess") };
        assert_eq!(ties, [(0, 1), (0, 2)]);
        let number = captures.add(CapturePool { ties, ..CapturePool::default() });
        captures.adopt(number, Capturing::Id(77), 5);
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(number));
        assert!(captures.close(0) && captures.close(1));
        for released in [1, 0] {
            assert!(!captures.is_released(number));
            captures.get_mut(released).unwrap().uses -= 1;
        }
        assert!(captures.is_released(number));
    }

    #[test]
    fn what_runs_when_a_pool_scope_opens_belongs_to_an_earlier_one() {
        let mut captures = captures();
        captures.open(0);
        captures.match_running(&[77, 77]);
        captures.open(1);
        assert_eq!(found(&mut captures, 88), PoolMatch::Pool(1));
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
    }

    #[test]
    fn of_two_pool_scopes_of_one_pool_the_one_without_a_capture_stays_open() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
        captures.open(0);
        // Capture 77 ends; capture 88, not seen yet, may still belong to the other.
        assert!(captures.close(0));
        captures.open(1);
        assert!(matches!(found(&mut captures, 88), PoolMatch::Tied(_)));
    }

    #[test]
    fn a_failed_capture_stays_with_the_only_pool_scope() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
        assert_eq!(captures.matched(Capturing::Invalidated, 5), PoolMatch::Pool(0));
        captures.open(1);
        assert!(matches!(captures.matched(Capturing::Invalidated, 5), PoolMatch::Tied(_)));
    }

    #[test]
    fn a_failed_capture_is_forgotten_by_the_thread_that_began_it_only() {
        let mut captures = captures();
        captures.open(0);
        // Not seen yet: the capture may be about to begin.
        assert_eq!((captures.has_own(), captures.forget_failed()), (false, 0));
        assert_eq!(found(&mut captures, 77), PoolMatch::Pool(0));
        std::thread::scope(|scope| {
            scope
                .spawn(|| assert_eq!((captures.has_own(), captures.forget_failed()), (false, 0)))
                .join()
                .unwrap();
        });
        captures.open(1);
        assert_eq!((captures.has_own(), captures.forget_failed()), (true, 1));
        assert!(captures.is_released(0) && !captures.is_released(1));
        assert!(!captures.close(0) && captures.close(1));
    }

    #[test]
    fn a_pool_is_released_when_it_was_as_often_as_begun() {
        let mut captures = captures();
        for _ in 0..2 {
            captures.open(0);
            assert!(captures.close(0));
        }
        for _ in 0..2 {
            assert!(!captures.is_released(0));
            captures.get_mut(0).unwrap().uses -= 1;
        }
        assert!(captures.is_released(0));
        assert!(captures.released().eq([(0, 2), (1, 0)]));
        let never = captures.add_never();
        assert!(!captures.is_released(never));
    }
}
