//! Freed blocks that wait for the streams that may still use them.
//!
//! Each lock has its list: a shard's has one of slots, the central lock one of runs. One list for a
//! whole device would need a lock of its own, as a shard's lock and the central one are never held
//! together; each free that waits and each look would take it besides.
//!
//! A look goes over the whole list, since two in five and more of the frees that it meets are over
//! (docs/decisions/house.md): finding these by stream would cost more at each free than it saves at
//! the looks.
//!
//! Pure book-keeping: the caller says how far the streams are.

/// A stream, and one of its epochs.
pub(crate) type Wait = (u32, u64);

/// Work of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Its last epoch.
    pub(crate) epoch: u64,
    /// The last epoch whose freed memory a stream may have that comes after the work
    /// ([`crate::order::streams`]).
    pub(crate) ripe: u64,
}

impl Work {
    /// All work of a stream up to `epoch`, and that of all who used its blocks.
    pub(crate) fn of_all(epoch: u64) -> Self {
        Self { epoch, ripe: epoch }
    }

    /// Both.
    pub(crate) fn max(self, other: Self) -> Self {
        Self { epoch: self.epoch.max(other.epoch), ripe: self.ripe.max(other.ripe) }
    }
}

enum Waits {
    /// One stream, in nearly all cases: no memory of its own.
    One(Wait),
    Many(Vec<Wait>),
}

/// The free of a block that waits for streams.
pub(crate) struct PendingFree<B> {
    pub(crate) block: B,
    /// The block's stream, and the epoch of the free there.
    pub(crate) own: Wait,
    waits: Waits,
}

impl<B> PendingFree<B> {
    fn waits(&self) -> &[Wait] {
        match &self.waits {
            Waits::One(wait) => std::slice::from_ref(wait),
            Waits::Many(waits) => waits,
        }
    }

    /// Whether every stream is past its epoch; `completed` is the last epoch that a stream is past.
    pub(crate) fn is_over(&self, completed: impl Fn(u32) -> u64) -> bool {
        self.waits().iter().all(|&(stream, epoch)| completed(stream) >= epoch)
    }

    /// Whether the free on the block's own stream, and all that it waits for, come before the work
    /// to come of a requesting stream, which may then have the block.
    pub(crate) fn is_ordered(
        &self,
        may_reuse: impl Fn(Wait) -> bool,
        is_before: impl Fn(Wait) -> bool,
    ) -> bool {
        may_reuse(self.own) && self.waits().iter().all(|&wait| is_before(wait))
    }

    /// The only stream still to wait for, the latest of its epochs that matter, and whether that is
    /// for the block's own sake. Waits of which `is_before` holds, or `may_reuse` of the block's
    /// own, need nothing. `None`: several streams are left, or none.
    pub(crate) fn only_wait(
        &self,
        may_reuse: impl Fn(&Wait) -> bool,
        is_before: impl Fn(&Wait) -> bool,
    ) -> Option<(Wait, bool)> {
        let own = Some(&self.own).filter(|own| !may_reuse(own)).map(|&own| (own, true));
        let waits = self.waits().iter().filter(|wait| !is_before(wait)).map(|&wait| (wait, false));
        let mut left = waits.chain(own);
        let first = left.next()?;
        left.try_fold(first, |((stream, epoch), _), ((other, later), of_own)| {
            (other == stream).then(|| ((stream, epoch.max(later)), of_own))
        })
    }
}

/// The frees that wait behind one lock; `B` is the name of a block there.
pub(crate) struct PendingFrees<B> {
    frees: Vec<PendingFree<B>>,
    /// The strides of the last [`PendingFrees::is_due`].
    looked_at: u64,
}

impl<B> Default for PendingFrees<B> {
    fn default() -> Self {
        Self { frees: Vec::new(), looked_at: 0 }
    }
}

impl<B> PendingFrees<B> {
    /// Queues a freed block until its users, and `also`, have passed their epochs (`epoch_of`).
    /// `own` is the free on the block's own stream.
    pub(crate) fn push(
        &mut self,
        block: B,
        own: Wait,
        users: Vec<u32>,
        also: Option<u32>,
        epoch_of: impl Fn(u32) -> u64,
    ) {
        let also = also.filter(|user| !users.contains(user));
        let wait = |user: u32| (user, epoch_of(user));
        let waits = match (&users[..], also) {
            (&[user], None) | (&[], Some(user)) => Waits::One(wait(user)),
            _ => Waits::Many(users.into_iter().chain(also).map(wait).collect()),
        };
        self.frees.push(PendingFree { block, own, waits });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frees.is_empty()
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = &B> {
        self.frees.iter().map(|free| &free.block)
    }

    pub(crate) fn frees(&self) -> impl Iterator<Item = &PendingFree<B>> {
        self.frees.iter()
    }

    /// Whether to look for waits that are over. `strides` grows when any stream gets further: while
    /// it stays, no wait ends, old or new.
    pub(crate) fn is_due(&mut self, strides: u64) -> bool {
        std::mem::replace(&mut self.looked_at, strides) != strides && !self.frees.is_empty()
    }

    /// Removes the frees that `is_completed` has completed.
    pub(crate) fn complete_where(&mut self, mut is_completed: impl FnMut(&PendingFree<B>) -> bool) {
        self.frees.retain(|free| !is_completed(free));
    }

    /// Whether a wait is over that no look is due for; a bug if so.
    pub(crate) fn overlooks(&self, strides: u64, completed: impl Fn(u32) -> u64) -> bool {
        self.looked_at == strides && self.frees.iter().any(|free| free.is_over(&completed))
    }

    /// Whether passing `work` of `stream` would bring a free nearer to its end.
    pub(crate) fn any_behind(&self, stream: u32, work: Work) -> bool {
        let is_it = |&(other, of): &Wait, passed: u64| other == stream && of <= passed;
        let any = |free: &PendingFree<B>| {
            is_it(&free.own, work.ripe) || free.waits().iter().any(|wait| is_it(wait, work.epoch))
        };
        self.frees.iter().any(any)
    }

    /// The streams that frees wait for; some more than once.
    pub(crate) fn streams(&self) -> impl Iterator<Item = u32> {
        self.frees.iter().flat_map(PendingFree::waits).map(|wait| wait.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    const STREAMS: u32 = 4;

    /// How far each stream is, how often any got further, and how often a look asked.
    #[derive(Default)]
    struct Clock {
        completed: [u64; STREAMS as usize],
        strides: u64,
        asked: Cell<u64>,
    }

    impl Clock {
        fn completed(&self, stream: u32) -> u64 {
            self.asked.set(self.asked.get() + 1);
            self.completed[stream as usize]
        }

        fn advance(&mut self, stream: u32) {
            self.completed[stream as usize] += 1;
            self.strides += 1;
        }

        /// The blocks whose waits are over, removed.
        fn complete(&self, pending: &mut PendingFrees<u64>) -> Vec<u64> {
            let mut gone = Vec::new();
            if pending.is_due(self.strides) {
                pending.complete_where(|free| {
                    let is_over = free.is_over(|stream| self.completed(stream));
                    gone.extend(is_over.then_some(free.block));
                    is_over
                });
            }
            gone
        }
    }

    /// A block freed on stream 0 in epoch 1 waits for epoch 1 of `users`.
    fn free(pending: &mut PendingFrees<u64>, block: u64, users: &[u32]) {
        pending.push(block, (0, 1), users.to_vec(), None, |_| 1);
    }

    fn waiting(pending: &PendingFrees<u64>) -> Vec<u64> {
        pending.blocks().copied().collect()
    }

    proptest! {
        #[test]
        fn what_all_streams_have_passed_leaves_in_the_order_of_the_frees_and_nothing_before(
            steps in proptest::collection::vec((0u8..4, 0u32..1 << STREAMS, 0..STREAMS), 0..200)
        ) {
            let (mut pending, mut clock) = (PendingFrees::default(), Clock::default());
            let mut waits: Vec<(u64, Vec<Wait>)> = Vec::new();
            for (block, (step, users, stream)) in (0..).zip(steps) {
                let users: Vec<u32> = (0..STREAMS).filter(|user| users >> user & 1 == 1).collect();
                match step {
                    0 => clock.advance(stream),
                    1 => {
                        let is_past = |&(of, epoch): &Wait| clock.completed[of as usize] >= epoch;
                        let over = waits.extract_if(.., |(_, waits)| waits.iter().all(is_past));
                        let over: Vec<u64> = over.map(|(block, _)| block).collect();
                        prop_assert_eq!(clock.complete(&mut pending), over);
                    }
                    _ => {
                        let also = (step == 2 || users.is_empty()).then_some(stream);
                        let open = |of: u32| clock.completed[of as usize] + 1;
                        let all =
                            (0..STREAMS).filter(|user| users.contains(user) || also == Some(*user));
                        waits.push((block, all.map(|user| (user, open(user))).collect()));
                        pending.push(block, (0, open(0)), users, also, open);
                    }
                }
                prop_assert!(!pending.overlooks(clock.strides, |of| clock.completed(of)));
                prop_assert_eq!(pending.is_empty(), waits.is_empty());
                prop_assert_eq!(
                    waiting(&pending), waits.iter().map(|(block, _)| *block).collect::<Vec<_>>()
                );
                let (mut streams, mut each) = (pending.streams().collect::<Vec<_>>(), Vec::new());
                each.extend(waits.iter().flat_map(|(_, waits)| waits).map(|wait| wait.0));
                streams.sort_unstable();
                each.sort_unstable();
                prop_assert_eq!(streams, each, "each stream once for each block that waits for it");
            }
        }
    }

    #[test]
    fn nothing_is_looked_at_while_no_stream_gets_further() {
        let (mut pending, mut clock) = (PendingFrees::default(), Clock::default());
        free(&mut pending, 512, &[1]);
        assert_eq!((clock.complete(&mut pending), clock.asked.get()), (vec![], 0));
        clock.advance(2);
        assert_eq!((clock.complete(&mut pending), clock.asked.get()), (vec![], 1));
        assert_eq!((clock.complete(&mut pending), clock.asked.get()), (vec![], 1));
        assert!(
            pending.overlooks(clock.strides, |_| 1),
            "a stream that got further must be told of"
        );
        clock.advance(1);
        assert_eq!(clock.complete(&mut pending), [512]);
    }

    #[test]
    fn a_block_that_waits_for_the_asker_only_is_the_askers() {
        let mut pending = PendingFrees::default();
        free(&mut pending, 512, &[1]);
        free(&mut pending, 1024, &[1, 2]);
        let mut ordered = |before: &[u32]| {
            let mut gone = Vec::new();
            pending.complete_where(|free| {
                let is_before = |(stream, _): Wait| before.contains(&stream);
                let is_it = free.is_ordered(is_before, is_before);
                gone.extend(is_it.then_some((free.block, free.own)));
                is_it
            });
            gone
        };
        assert_eq!(ordered(&[0, 2]), [], "it waits for another");
        assert_eq!(ordered(&[1]), [], "it lies behind the work of its own stream");
        assert_eq!(ordered(&[0, 1]), [(512, (0, 1))]);
        assert_eq!(waiting(&pending), [1024]);
    }

    #[test]
    fn what_a_wait_would_order_is_what_waits_for_that_epoch_or_lies_behind_it() {
        let mut pending = PendingFrees::default();
        pending.push(512, (3, 5), vec![], Some(1), |_| 7);
        for (stream, epoch, gains) in
            [(1, 6, false), (1, 7, true), (3, 4, false), (3, 5, true), (2, 9, false)]
        {
            assert_eq!(
                pending.any_behind(stream, Work { epoch, ripe: epoch }),
                gains,
                "epoch {epoch} of stream {stream}"
            );
        }
    }
}
