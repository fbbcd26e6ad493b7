//! The choice of idle pages for a row, among the free runs, with as little waste as possible.
//!
//! Only whole chunks can be mapped. So a row may begin or end in the middle of a chunk, if nothing
//! else is mapped there, and in between it consists of whole chunks. The pages of a chunk need not
//! be adjacent now: if all of them are idle, it is whole.

use crate::runs::arena::MovablePages;
use crate::small::size_class::PAGE;
use crate::supply::pages::ChunkId;
use crate::supply::pages::chunks::{Pages, Part, Piece};
use std::cmp::Reverse;

/// Pages that are to move.
pub(crate) struct Source {
    /// Their free run.
    pub(crate) movable: MovablePages,
    /// The pages.
    pub(crate) part: Part,
}

/// A part of a chunk, and the idle pages of a run in which it lies.
pub(crate) type IdlePart<'a> = (&'a MovablePages, Part);

/// Consecutive idle pages of a chunk, at any addresses.
#[derive(Clone)]
struct Idle<'a> {
    chunk: ChunkId,
    /// The first page, within the chunk.
    first: u32,
    /// Number of pages.
    count: u32,
    /// Pages of the chunk behind these.
    behind: u32,
    /// The parts that make them up, by page of the chunk.
    parts: &'a [IdlePart<'a>],
}

impl<'a> Idle<'a> {
    /// The idle pages of `parts`, which are by chunk and by page within it.
    fn all(parts: &'a [IdlePart<'a>]) -> Vec<Self> {
        let follows = |(_, a): &IdlePart<'_>, (_, b): &IdlePart<'_>| {
            a.chunk == b.chunk && a.first + a.count() == b.first
        };
        let rows = parts.chunk_by(follows).filter_map(|parts| {
            let (first, last) = (&parts.first()?.1, &parts.last()?.1);
            let count = last.first + last.count() - first.first;
            Some(Self { chunk: first.chunk, first: first.first, count, behind: last.behind, parts })
        });
        rows.collect()
    }

    /// Those that are whole chunks, longest first.
    fn whole_of(idle: &[Self]) -> Vec<&Self> {
        let mut whole: Vec<_> = idle.iter().filter(|idle| idle.is_whole()).collect();
        whole.sort_by_key(|idle| Reverse(idle.count));
        whole
    }

    fn is_whole(&self) -> bool {
        self.first == 0 && self.behind == 0
    }

    /// Their first `count` pages.
    fn front(&self, count: u32) -> Self {
        Self { count, behind: self.behind + self.count - count, ..self.clone() }
    }

    /// Their last `count` pages.
    fn back(&self, count: u32) -> Self {
        Self { first: self.first + self.count - count, count, ..self.clone() }
    }

    /// The parts, cut to these pages.
    fn sources(&self) -> impl Iterator<Item = Source> {
        let pages = self.first..self.first + self.count;
        self.parts.iter().filter_map(move |(movable, part)| {
            let (start, end) =
                (part.first.max(pages.start), (part.first + part.count()).min(pages.end));
            (start < end).then(|| Source {
                movable: (*movable).clone(),
                part: part.back(part.first + part.count() - start).front(end - start),
            })
        })
    }
}

/// The parts of chunks that make up `movable`, by chunk and by page within it.
pub(crate) fn parts_of<'a>(pages: &Pages, movable: &'a [MovablePages]) -> Vec<IdlePart<'a>> {
    let mut parts = Vec::with_capacity(movable.len());
    for movable in movable {
        parts.extend(pages.parts_back(&movable.pages).map(|part| (movable, part)));
    }
    // By chunk, then by page: one comparison where a pair takes two.
    parts.sort_unstable_by_key(|(_, part)| u64::from(part.chunk) << 32 | u64::from(part.first));
    parts
}

/// Of the idle `parts` ([`parts_of`]): those in the space that `is_here`, and these with those that
/// make up whole chunks in other spaces.
pub(crate) fn apart_from_others<'a>(
    parts: &'a [IdlePart<'a>],
    is_here: impl Fn(&MovablePages) -> bool,
) -> (Vec<IdlePart<'a>>, Vec<IdlePart<'a>>) {
    let (mut here, mut with_whole) = (Vec::new(), Vec::new());
    for idle in Idle::all(parts) {
        let own = idle.parts.iter().filter(|(pages, _)| is_here(pages));
        if idle.is_whole() && own.clone().next().is_none() {
            with_whole.extend_from_slice(idle.parts);
        } else {
            with_whole.extend(own.clone().cloned());
            here.extend(own.cloned());
        }
    }
    (here, with_whole)
}

/// The pages found for a row.
#[derive(Default)]
pub(crate) struct Gathered {
    /// The pieces of the row, by address.
    pub(crate) pieces: Vec<Piece>,
    /// The present places of the pages.
    pub(crate) sources: Vec<Source>,
    /// Number of pages.
    pub(crate) pages: u64,
    /// Pages of the first chunk before the row and of the last one behind it, if the row splits
    /// them.
    split: (u32, u32),
}

impl Gathered {
    fn push(&mut self, idle: &Idle<'_>) {
        if self.pieces.is_empty() {
            self.split.0 = idle.first;
        }
        self.split.1 = idle.behind;
        self.pages += u64::from(idle.count);
        self.pieces.push(Piece { chunk: idle.chunk, first: idle.first, count: idle.count });
        self.sources.extend(idle.sources());
    }

    /// Address space that the first and the last chunk take before and behind the row, if they are
    /// the row's ends.
    pub(crate) fn stale_aliases(&self) -> (u64, u64) {
        (u64::from(self.split.0) * PAGE, u64::from(self.split.1) * PAGE)
    }

    /// The chunk of which the row takes a part, and the pages that it leaves.
    pub(crate) fn torn(&self) -> Option<(ChunkId, u32)> {
        let ends = [(self.pieces.last(), self.split.1), (self.pieces.first(), self.split.0)];
        ends.into_iter().find_map(|(piece, rest)| Some((piece?.chunk, rest)).filter(|_| rest > 0))
    }

    /// All chunks of `parts` ([`parts_of`]) that are idle as a whole, longest first.
    pub(crate) fn whole(parts: &[IdlePart<'_>]) -> Self {
        let mut gathered = Self::default();
        Idle::whole_of(&Idle::all(parts)).into_iter().for_each(|idle| gathered.push(idle));
        gathered
    }

    /// Chooses up to `need` pages of `parts` ([`parts_of`]): one part of a chunk if long enough,
    /// else the tail of a chunk, whole chunks and the head of a chunk. The rest of a split chunk
    /// before and behind the row must fit into `room` (bytes).
    pub(crate) fn choose(parts: &[IdlePart<'_>], need: u32, room: (u64, u64)) -> Self {
        let reaches = |idle: &Idle<'_>| {
            let (left, right) = (u64::from(idle.first) * PAGE, u64::from(idle.behind) * PAGE);
            (left <= room.0, right <= room.1)
        };
        let idle = Idle::all(parts);
        let mut gathered = Self::default();
        // One part: from a split chunk rather than a whole one, and the shortest; its chunk is
        // split already.
        let one = idle.iter().filter(|idle| idle.count >= need).filter_map(|idle| {
            let (front, back) = (idle.front(need), idle.back(need));
            let cuts = if idle.behind == 0 { [front, back] } else { [back, front] };
            let cut = cuts.into_iter().find(|cut| reaches(cut) == (true, true))?;
            Some((idle, cut))
        });
        if let Some((_, cut)) = one.min_by_key(|(idle, _)| (idle.is_whole(), idle.count)) {
            gathered.push(&cut);
            return gathered;
        }
        // Several: whole chunks in the middle, a part of a split one at each end.
        let split = |head: bool| {
            let fits = |idle: &&Idle<'_>| {
                let (left, right) = reaches(idle);
                let at_end = if head { idle.first == 0 && right } else { idle.behind == 0 && left };
                at_end && !idle.is_whole() && idle.count < need
            };
            idle.iter().filter(fits).max_by_key(|idle| idle.count)
        };
        let mut left = need;
        // All of it: each of the two is shorter than the need.
        if let Some(tail) = split(false) {
            left -= tail.count;
            gathered.push(tail);
        }
        // Cut short, it leaves more of its chunk behind the row.
        let head = split(true)
            .map(|idle| idle.front(idle.count.min(left)))
            .filter(|head| head.count > 0 && reaches(head).1);
        left -= head.as_ref().map_or(0, |head| head.count);
        let mut longer = None;
        for idle in Idle::whole_of(&idle) {
            if idle.count <= left {
                left -= idle.count;
                gathered.push(idle);
            } else {
                // The shortest of those that are too long.
                longer = Some(idle);
            }
        }
        // If only whole chunks that are too long are left, splits one, if that yields more.
        let covered = head.as_ref().map_or(0, |head| head.count);
        let longer =
            longer.filter(|_| left > 0).map(|idle| idle.front((left + covered).min(idle.count)));
        let head = longer.filter(|cut| cut.count > covered && reaches(cut).1).or(head);
        if let Some(head) = &head {
            gathered.push(head);
        }
        gathered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Idle pages of chunk `chunk`: `first` to `first + count` of `pages`.
    fn idle(chunk: ChunkId, pages: u32, first: u32, count: u32) -> (MovablePages, Part) {
        let address = (u64::from(chunk) * 100 + u64::from(first)) * PAGE;
        let range = address..address + u64::from(count) * PAGE;
        let part = Part { pages: range.clone(), chunk, first, behind: pages - first - count };
        (MovablePages { run: chunk, pages: range, stranded: 0, used: None }, part)
    }

    fn choose(idle: &[(MovablePages, Part)], need: u32, room: (u64, u64)) -> Gathered {
        let parts: Vec<_> = idle.iter().map(|(pages, part)| (pages, part.clone())).collect();
        Gathered::choose(&parts, need, room)
    }

    #[test]
    fn the_rest_of_a_head_that_is_cut_short_needs_room_too() {
        // The tail of one chunk, and of the head of another two pages of three: two pages of that
        // chunk lie behind the row, and there is room for one.
        let parts = [idle(0, 4, 1, 3), idle(1, 4, 0, 3)];
        let found = choose(&parts, 5, (PAGE, PAGE));
        let (_, behind) = found.stale_aliases();
        assert!(behind <= PAGE, "{} pages behind the row", behind / PAGE);
    }

    proptest! {
        #[test]
        fn a_row_of_whole_chunks_but_for_its_ends_fits_into_its_room(
            chunks in proptest::collection::vec((1u32..9, 0u32..4, 1u32..9), 0..6),
            need in 1u32..14,
            room in (0u64..8, 0u64..8),
        ) {
            let some = (0..).zip(chunks).filter(|(_, (pages, first, _))| first < pages);
            let parts: Vec<_> = some.map(|(chunk, (pages, first, count))| {
                idle(chunk, pages, first, count.min(pages - first))
            }).collect();
            let found = choose(&parts, need, (room.0 * PAGE, room.1 * PAGE));
            let pages: u32 = found.pieces.iter().map(|piece| piece.count).sum();
            prop_assert_eq!(u64::from(pages), found.pages);
            prop_assert!(pages <= need);
            let (before, behind) = found.stale_aliases();
            prop_assert!(before <= room.0 * PAGE && behind <= room.1 * PAGE);
            let last = found.pieces.len().saturating_sub(1);
            for (at, piece) in found.pieces.iter().enumerate() {
                let part = &parts.iter().find(|(_, part)| part.chunk == piece.chunk).unwrap().1;
                let whole = part.first + part.count() + part.behind;
                prop_assert!(piece.first == 0 || at == 0);
                prop_assert!(piece.first + piece.count == whole || at == last);
            }
        }
    }
}
