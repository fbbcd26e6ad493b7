//! Blocks that the allocator hands out and takes back.

use crate::backing::{Backing, Backings, Source};
use crate::oracle::Oracle;
use crate::oracle::content::{Content, Live, Past, Use, Uses};
use crate::oracle::fault::{Fault, Taker};
use crate::oracle::intervals::Intervals;
use crate::streams::StreamKey;

/// A contiguous part of a block, in address space and in physical memory.
#[derive(Clone, Copy, Debug)]
struct Place {
    address: u64,
    physical: u64,
    bytes: u64,
    /// Part of a mapping, so other addresses may reach it.
    mapped: bool,
}

impl Place {
    fn of(piece: &Backing) -> Self {
        let mapped = matches!(piece.source, Source::Mapping(_));
        Self { address: piece.address, physical: piece.physical, bytes: piece.bytes, mapped }
    }
}

/// The places of a block. Most have one, which needs no heap memory.
#[derive(Debug, Default)]
struct Places {
    last: Option<Place>,
    before: Vec<Place>,
}

impl Places {
    /// Adds a place, merged with the last one if contiguous.
    fn push(&mut self, place: Place) {
        match &mut self.last {
            Some(last)
                if last.physical + last.bytes == place.physical && last.mapped == place.mapped =>
            {
                last.bytes += place.bytes;
            }
            last => self.before.extend(last.replace(place)),
        }
    }

    fn iter(&self) -> impl Iterator<Item = Place> + '_ {
        self.before.iter().copied().chain(self.last)
    }
}

/// Marks as former use the parts of a range that block `id` still has, not those that others took
/// meanwhile.
fn vacate(map: &mut Intervals<Content>, start: u64, bytes: u64, id: u64, past: &Past) {
    let is_own = |content: &Content| matches!(content, Content::Live(live) if live.id == id);
    if let Some(content) = map.exact_mut(start, start + bytes)
        && is_own(content)
    {
        *content = Content::Past(past.clone());
        return;
    }
    let mut own = Vec::new();
    map.visit(start, start + bytes, |from, to, content| {
        if is_own(content) {
            own.push((from, to));
        }
    });
    for (from, to) in own {
        map.replace(from, to, Content::Past(past.clone()), |_, _, _| {});
    }
}

/// A live block.
#[derive(Debug)]
pub(crate) struct Block {
    id: u64,
    places: Places,
    stream: StreamKey,
    /// Streams recorded on the block, without its own.
    recorded: Vec<StreamKey>,
    /// The capture of its allocation, 0: none.
    capture: u64,
}

/// A block handed out by the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlock {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    pub(crate) stream: StreamKey,
    /// The capture of its stream, 0: none.
    pub(crate) capture: u64,
    /// Outside any capture, in the memory of a group, for which `capture` stands.
    pub(crate) apart: bool,
}

impl Oracle {
    pub(crate) fn malloc(&mut self, new: NewBlock, backings: &Backings) {
        let NewBlock { id, address, bytes, stream, capture, .. } = new;
        let mut places: Places = Places::default();
        let mut backed = 0;
        let mut shut = None;
        for piece in backings.pieces(address, bytes) {
            backed += piece.bytes;
            if piece.access & (1 << new.device) == 0 {
                shut = shut.or(Some(piece.address));
            }
            places.push(Place::of(&piece));
        }
        for place in places.iter() {
            self.occupy(place, new);
        }
        if let Some(address) = shut {
            self.report(Fault::NoAccess { block: id, address, device: new.device });
        }
        if backed < bytes {
            self.report(Fault::Unbacked { block: id, address: address + backed, backed, bytes });
        }
        self.blocks.insert(address, Block { id, places, stream, recorded: Vec::new(), capture });
    }

    /// Puts a block in a place and judges the former uses. Reports one fault of a kind per place.
    fn occupy(&mut self, place: Place, new: NewBlock) {
        let live = Live { id: new.id, address: new.address, capture: new.capture };
        let mut faults: Vec<Fault> = Vec::new();
        let mut physical = std::mem::take(&mut self.physical);
        physical.replace(
            place.physical,
            place.physical + place.bytes,
            Content::Live(live),
            |start, _, old| {
                let address = place.address + (start - place.physical);
                let fault = match old {
                    Content::Live(old) => Some(Fault::TwoLive {
                        block: new.id,
                        address,
                        other: old.id,
                        other_address: old.address,
                    }),
                    Content::Past(past) => self.judge_reuse(past, new, address),
                };
                let is_new = |fault: &Fault| {
                    faults
                        .iter()
                        .all(|known| std::mem::discriminant(known) != std::mem::discriminant(fault))
                };
                let fault = fault.filter(is_new);
                faults.extend(fault);
            },
        );
        self.physical = physical;
        if place.mapped {
            self.mapped.replace(
                place.address,
                place.address + place.bytes,
                Content::Live(live),
                |_, _, _| {},
            );
        }
        for fault in faults {
            self.report(fault);
        }
    }

    fn judge_reuse(&self, past: &Past, new: NewBlock, address: u64) -> Option<Fault> {
        if past.capture != 0 && past.capture != new.capture {
            if self.share_memory(past.capture, new.capture) {
                // The program must replay graphs that share memory one after the other.
                if !new.apart {
                    return None;
                }
                return self.unordered(
                    past,
                    new,
                    address,
                    |past| self.is_before(past, new.stream),
                    &[],
                );
            }
            if self.may_replay(past.capture) {
                let by = Taker::Block(new.id);
                return Some(Fault::GraphMemory { by, address, capture: past.capture });
            }
        }
        // Replays run on streams unknown to the capture, which cannot capture a wait for them:
        // earlier uses of the memory must be over.
        let outside = past.capture != new.capture;
        let is_fine = |past| {
            if outside && new.capture != 0 {
                self.is_over(past)
            } else {
                self.is_before(past, new.stream)
            }
        };
        let replays = if outside { self.replays(past.capture) } else { &[] };
        self.unordered(past, new, address, is_fine, replays)
    }

    /// The fault if a use of `past`, or one of `replays`, is not ordered before the new block.
    fn unordered(
        &self,
        past: &Past,
        new: NewBlock,
        address: u64,
        is_fine: impl Fn(Use) -> bool,
        replays: &[Use],
    ) -> Option<Fault> {
        let unordered = past.uses.as_slice().iter().chain(replays).find(|&&past| !is_fine(past))?;
        Some(Fault::OutOfOrder {
            block: new.id,
            address,
            stream: self.name(new.stream),
            previous: past.id,
            on: self.name(unordered.stream),
        })
    }

    pub(crate) fn free(&mut self, address: u64) {
        let Some(block) = self.blocks.remove(&address) else {
            self.report(Fault::UnknownBlock { address });
            return;
        };
        let own = self.advance(block.stream);
        let uses = if block.recorded.is_empty() {
            Uses::One(own)
        } else {
            let mut all: Vec<Use> = vec![own];
            all.extend(block.recorded.iter().map(|&stream| self.advance(stream)));
            Uses::Many(all.into_boxed_slice())
        };
        let past = Past { id: Some(block.id), capture: block.capture, uses };
        for place in block.places.iter() {
            if place.mapped {
                vacate(&mut self.mapped, place.address, place.bytes, block.id, &past);
            }
            vacate(&mut self.physical, place.physical, place.bytes, block.id, &past);
        }
    }

    pub(crate) fn record_stream(&mut self, address: u64, stream: StreamKey) {
        match self.blocks.get_mut(&address) {
            None => self.report(Fault::UnknownBlock { address }),
            Some(block) if block.stream == stream || block.recorded.contains(&stream) => {}
            Some(block) => block.recorded.push(stream),
        }
    }
}
