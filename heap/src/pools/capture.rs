//! Captures: which private pool the blocks of a CUDA graph come from.
//!
//! Blocks of a capture come from the pool of their pool id, and go back there
//! ([`Reuse::Private`](super::Reuse::Private)): nobody else ever gets them before the pool is
//! released, its blocks are freed, and the device has been synchronised after both (replays run on
//! streams that nobody tells us of). One pool id may serve several captures; they are counted.
//!
//! The hooks name a pool, the driver names a capture, and nobody says which belongs to which. Each
//! capture begins inside a pool scope of its own, so with one pool scope that has no capture yet
//! the answer is certain. With several, the capture gets a fresh pool that is tied to all that it
//! could belong to: a wrong guess would share memory between graphs that are replayed side by side.

use std::thread::{self, ThreadId};

/// torch's `MempoolId_t`.
pub type PoolId = (u64, u64);

/// What a stream that does not simply run its work is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capturing {
    /// The capture of this id of the driver's.
    Id(u64),
    /// A capture that has failed and waits to be ended; the driver does not say which.
    Invalidated,
    /// The driver cannot tell whether it captures.
    Unclear,
}

/// Set in the key of a stream whose capture has failed; the ids of captures are counted up from 1.
const INVALIDATED: u64 = 1 << 63;

/// What uses the private memory of one pool id, or of captures that no pool id is known of.
#[derive(Default)]
pub(crate) struct CapturePool {
    pub(crate) id: Option<PoolId>,
    /// Without an id: the pools that its captures may belong to. It is not over before they are.
    pub(crate) ties: Vec<PoolId>,
    /// The driver's ids of the captures under way that allocate from it.
    pub(crate) captures: Vec<u64>,
    pub(crate) open: u32,
    pub(crate) uses: u32,
    /// Changes when its memory goes to others: states of it are of no use after that.
    pub(crate) era: u64,
    /// Raised with each pool scope: what was over and is unchanged, in blocks served too, has been
    /// over all the time.
    pub(crate) version: u64,
}

impl CapturePool {
    pub(crate) fn new(id: PoolId) -> Self {
        Self { id: Some(id), ..Self::default() }
    }

    /// No graph uses it, and none is being made.
    fn is_released(&self) -> bool {
        self.uses == 0 && self.open == 0
    }
}

/// Where a capture's blocks come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Pool(u32),
    /// A new one, tied to these.
    Tied(Vec<PoolId>),
    /// A new one, for what is never reused.
    Never,
}

/// An open pool scope, from its begin to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PoolScope {
    /// The number of its pool.
    pool: u32,
    /// The capture that it was matched to.
    capture: Option<u64>,
    /// Who opened it, and is to close it.
    thread: ThreadId,
}

/// The capture pools of a device, and the pool scopes that are open.
#[derive(Default)]
pub(crate) struct Captures {
    /// Pools by number; `None`: the number is free for another.
    pools: Vec<Option<CapturePool>>,
    /// The open pool scopes, oldest first.
    scopes: Vec<PoolScope>,
    /// The pool of captures of which it is not known whose they are: without the hooks, nobody
    /// tells when the graph is gone.
    never: Option<u32>,
    /// Eras of all pools so far.
    eras: u64,
}

impl Captures {
    fn position(&self, is_it: impl Fn(&CapturePool) -> bool) -> Option<u32> {
        self.pools.iter().position(|pool| pool.as_ref().is_some_and(&is_it)).map(|at| at as u32)
    }

    /// The number of pool `id`.
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

    /// The pool of what is never reused; its number.
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

    /// All pools that torch has an id for.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, PoolId)> {
        self.pools.iter().enumerate().filter_map(|(at, pool)| Some((at as u32, pool.as_ref()?.id?)))
    }

    /// torch's id of a pool.
    pub(crate) fn id(&self, number: u32) -> Option<PoolId> {
        self.pools.get(number as usize)?.as_ref()?.id
    }

    /// The memory of a pool goes to others.
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
    /// Of two, one with a capture goes first: a pool scope too many without one makes captures
    /// uncertain, one too few makes them wrong.
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

    /// A pool scope is gone.
    fn closed(&mut self, number: u32) {
        let Some(pool) = self.get_mut(number) else { return };
        pool.open = pool.open.saturating_sub(1);
        if pool.open == 0 {
            pool.captures.clear();
        }
        // What was uncertain must be asked again: there are fewer answers now.
        let id = pool.id;
        for pool in self.pools.iter_mut().flatten() {
            if id.is_some_and(|id| pool.ties.contains(&id)) {
                pool.captures.clear();
            }
        }
    }

    /// Whether this thread has left a pool scope open whose capture was seen.
    pub(crate) fn has_own(&self) -> bool {
        let mine = thread::current().id();
        self.scopes.iter().any(|scope| scope.thread == mine && scope.capture.is_some())
    }

    /// Closes and releases the pool scopes of this thread whose captures were seen; how many. The
    /// caller has found that no stream captures.
    ///
    /// torch ends a capture by asking the driver for the graph, and where that fails (something
    /// forbidden was done inside) it throws at once: no end comes, and no release ever. The thread
    /// that began it is here now, so it is past that.
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

    /// The pools of the open pool scopes, those without a capture or all of them, each once.
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

    /// Where the blocks of `stream`, which does what `capturing` says, come from. A pool that is
    /// made as the answer says goes to [`Captures::adopt`].
    pub(crate) fn matched(&mut self, capturing: Capturing, stream: u32) -> Found {
        let key = match capturing {
            Capturing::Id(id) => id,
            Capturing::Invalidated => INVALIDATED | u64::from(stream),
            Capturing::Unclear => return self.never(),
        };
        if let Some(number) = self.position(|pool| pool.captures.contains(&key)) {
            return Found::Pool(number);
        }
        let unmatched = self.candidates(true);
        if let (Capturing::Id(id), &[number]) = (capturing, unmatched.as_slice()) {
            self.assign(number, id);
            return Found::Pool(number);
        }
        // A failed capture may have been matched while its id was known; so may the other of two
        // pool scopes of one pool.
        let is_new = matches!(capturing, Capturing::Id(_)) && !unmatched.is_empty();
        let candidates = if is_new { unmatched } else { self.candidates(false) };
        match candidates.as_slice() {
            [] => self.never(),
            &[number] => Found::Pool(number),
            many => Found::Tied(
                many.iter().filter_map(|&at| self.pools[at as usize].as_ref()?.id).collect(),
            ),
        }
    }

    /// Notes that the blocks of `stream` come from pool `number`, made as [`Captures::matched`]
    /// said.
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

    /// One pool is enough for all that is never reused.
    fn never(&self) -> Found {
        self.never.map_or(Found::Never, Found::Pool)
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

    /// Whether a pool scope is open that has no capture yet.
    pub(crate) fn has_unmatched(&self) -> bool {
        self.scopes.iter().any(|scope| scope.capture.is_none())
    }

    /// A pool scope is about to open, and `running` are captures: where only one answer is left,
    /// they are matched now, while it is.
    pub(crate) fn match_running(&mut self, running: &[u64]) {
        let known = |id: &u64| self.position(|pool| pool.captures.contains(id)).is_some();
        let mut unknown: Vec<u64> = running.iter().copied().filter(|id| !known(id)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if let (&[capture], &[number]) = (unknown.as_slice(), self.candidates(true).as_slice()) {
            self.assign(number, capture);
        }
    }

    /// Whether no graph uses a pool any more: once its blocks are freed and the device has been
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

    /// The pools that are released, with their versions.
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

    fn found(captures: &mut Captures, id: u64) -> Found {
        captures.matched(Capturing::Id(id), 5)
    }

    #[test]
    fn a_capture_keeps_the_pool_of_its_first_allocation() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
        captures.open(1);
        assert_eq!(found(&mut captures, 88), Found::Pool(1));
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
        assert!(captures.close(0) && captures.close(1) && !captures.close(1));
        assert_eq!(found(&mut captures, 77), Found::Never);
    }

    #[test]
    fn a_capture_that_may_belong_to_two_pools_is_tied_to_both() {
        let mut captures = captures();
        captures.open(0);
        captures.open(1);
        let Found::Tied(ties) = found(&mut captures, 77) else { panic!("a guess") };
        assert_eq!(ties, [(0, 1), (0, 2)]);
        let number = captures.add(CapturePool { ties, ..CapturePool::default() });
        captures.adopt(number, Capturing::Id(77), 5);
        assert_eq!(found(&mut captures, 77), Found::Pool(number));
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
        assert_eq!(found(&mut captures, 88), Found::Pool(1));
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
    }

    #[test]
    fn of_two_pool_scopes_of_one_pool_the_one_without_a_capture_stays_open() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
        captures.open(0);
        // Capture 77 ends; capture 88, not seen yet, may still be the other's.
        assert!(captures.close(0));
        captures.open(1);
        assert!(matches!(found(&mut captures, 88), Found::Tied(_)));
    }

    #[test]
    fn a_failed_capture_stays_with_the_only_pool_scope() {
        let mut captures = captures();
        captures.open(0);
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
        assert_eq!(captures.matched(Capturing::Invalidated, 5), Found::Pool(0));
        captures.open(1);
        assert!(matches!(captures.matched(Capturing::Invalidated, 5), Found::Tied(_)));
    }

    #[test]
    fn a_failed_capture_is_forgotten_by_the_thread_that_began_it_only() {
        let mut captures = captures();
        captures.open(0);
        // Not seen yet: it may be about to begin.
        assert_eq!((captures.has_own(), captures.forget_failed()), (false, 0));
        assert_eq!(found(&mut captures, 77), Found::Pool(0));
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
