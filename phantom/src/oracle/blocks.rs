//! Blocks: what the allocator hands out and takes back.

use crate::backing::{Backing, Backings, Source};
use crate::oracle::Oracle;
use crate::oracle::content::{Content, Live, Past, Use, Uses};
use crate::oracle::fault::{Fault, Taker};
use crate::streams::StreamKey;

/// A live block.
#[derive(Debug)]
pub(crate) struct Block {
    id: u64,
    bytes: u64,
    stream: StreamKey,
    /// Streams recorded on it, its own not among them.
    recorded: Vec<StreamKey>,
    /// The capture that it was allocated in, 0: none.
    capture: u64,
}

/// A block that the allocator has handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlock {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    pub(crate) stream: StreamKey,
    /// The capture that its stream is in, 0: none.
    pub(crate) capture: u64,
}

impl Oracle {
    pub(crate) fn malloc(&mut self, new: NewBlock, backings: &Backings) {
        let NewBlock { id, address, bytes, stream, capture, .. } = new;
        let mut backed = 0;
        let mut shut = None;
        let mut faults = Vec::new();
        for piece in backings.pieces(address, bytes) {
            backed += piece.bytes;
            if piece.access & (1 << new.device) == 0 {
                shut = shut.or(Some(piece.address));
            }
            self.occupy(&piece, new, &mut faults);
        }
        for fault in faults {
            self.report(fault);
        }
        if let Some(address) = shut {
            self.report(Fault::NoAccess { block: id, address, device: new.device });
        }
        if backed < bytes {
            self.report(Fault::Unbacked { block: id, address: address + backed, backed, bytes });
        }
        self.blocks.insert(address, Block { id, bytes, stream, recorded: Vec::new(), capture });
    }

    /// Puts a block's piece over what was there, and judges that. One fault of a kind a piece says enough.
    fn occupy(&mut self, piece: &Backing, new: NewBlock, faults: &mut Vec<Fault>) {
        let NewBlock { id, capture, .. } = new;
        let live = Live { id, address: new.address, capture };
        let mut physical = std::mem::take(&mut self.physical);
        let from = faults.len();
        physical.replace(
            piece.physical,
            piece.physical + piece.bytes,
            Content::Live(live),
            |start, _, old| {
                let address = piece.address + (start - piece.physical);
                let fault = match old {
                    Content::Live(old) => {
                        Some(Fault::TwoLive { block: id, address, other: old.id, other_address: old.address })
                    }
                    Content::Past(past) => self.judge_reuse(past, new, address),
                };
                let same = |a: &Fault| {
                    fault.as_ref().is_some_and(|b| std::mem::discriminant(a) == std::mem::discriminant(b))
                };
                if !faults[from..].iter().any(same) {
                    faults.extend(fault);
                }
            },
        );
        self.physical = physical;
        if matches!(piece.source, Source::Mapping(_)) {
            let end = piece.address + piece.bytes;
            self.mapped.replace(piece.address, end, Content::Live(live), |_, _, _| {});
        }
    }

    fn judge_reuse(&self, past: &Past, new: NewBlock, address: u64) -> Option<Fault> {
        if past.capture != 0 && past.capture != new.capture {
            if self.share_memory(past.capture, new.capture) {
                // Graphs that share memory are replayed one after the other: that is the program's part.
                return None;
            }
            if self.may_replay(past.capture) {
                let by = Taker::Block(new.id);
                return Some(Fault::GraphMemory { by, address, capture: past.capture });
            }
        }
        // Replays run on streams that the capture does not know, and no wait may be captured for them: what used the memory
        // before a capture must be over.
        let outside = past.capture != new.capture;
        let is_fine = |past| {
            if outside && new.capture != 0 { self.is_over(past) } else { self.is_before(past, new.stream) }
        };
        let replays = if outside { self.replays(past.capture) } else { &[] };
        let unordered = past.uses.as_slice().iter().chain(replays).find(|&&past| !is_fine(past))?;
        Some(Fault::OutOfOrder {
            block: new.id,
            address,
            stream: self.name(new.stream),
            previous: past.id,
            on: self.name(unordered.stream),
        })
    }

    pub(crate) fn free(&mut self, address: u64, backings: &Backings) {
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
        for piece in backings.pieces(address, block.bytes) {
            let content = Content::Past(past.clone());
            if matches!(piece.source, Source::Mapping(_)) {
                let end = piece.address + piece.bytes;
                self.mapped.replace(piece.address, end, content.clone(), |_, _, _| {});
            }
            self.physical.replace(piece.physical, piece.physical + piece.bytes, content, |_, _, _| {});
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
