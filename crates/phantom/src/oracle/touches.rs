//! Touches: memory that kernels really use, for programs that allocate and free by CUDA's rules.
//!
//! By torch's rule, a free is the last possible use on the block's streams ([`super`]). `cudaFree`
//! promises more: no work of *any* stream still uses the memory. To judge that, the harness reports
//! the program's blocks and the touches of each kernel. The rule: when bytes are handed out again,
//! or a kernel touches them, no other kernel may still run on them, unless the order of streams
//! puts it before. Running is literal here, on the virtual clock: finished work is finished,
//! whether or not the host knows. So only long kernels reveal a fault.

use std::collections::BTreeMap;

use crate::backing::Backings;
use crate::oracle::content::Use;
use crate::oracle::driver::Taken;
use crate::oracle::fault::Fault;
use crate::oracle::intervals::Intervals;
use crate::oracle::{Oracle, push_of_block};
use crate::streams::StreamKey;

/// A kernel's use of a byte.
#[derive(Clone, Copy, Debug)]
struct Touch {
    by: Use,
    /// The kernel's end, virtual nanoseconds.
    end: u64,
    /// The block at that time, 0: none.
    block: u64,
    /// The address used, minus the number of the physical byte.
    way: u64,
}

/// A block of the program.
#[derive(Clone, Copy, Debug)]
struct Owned {
    id: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Touches {
    /// By physical byte, the last touch on each stream.
    by_byte: Intervals<Vec<Touch>>,
    owned: BTreeMap<u64, Owned>,
    blocks: u64,
}

/// A kernel with its place on a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub(crate) by: Use,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Touches {
    /// Whether the harness has ever reported a block of the program.
    pub(crate) fn is_watching(&self) -> bool {
        self.blocks > 0
    }

    /// The program's blocks, and their bytes.
    pub(crate) fn owned(&self) -> (usize, u64) {
        (self.owned.len(), self.owned.values().map(|block| block.bytes).sum())
    }

    fn holding(&self, address: u64) -> Option<(u64, Owned)> {
        let (&start, &block) = self.owned.range(..=address).next_back()?;
        (address - start < block.bytes).then_some((start, block))
    }

    fn forget(&mut self, physical: u64, bytes: u64) {
        self.by_byte.clear(physical, physical + bytes, |_, _, _| {});
    }
}

impl Oracle {
    /// The program got `bytes` at `address`, usable in the order of `stream`, or (`None`) by any
    /// stream at once.
    pub(crate) fn owns(
        &mut self,
        address: u64,
        bytes: u64,
        stream: Option<StreamKey>,
        now: u64,
        backings: &Backings,
    ) {
        self.touches.blocks += 1;
        let id = self.touches.blocks;
        let mut faults = Vec::new();
        if let Some((&other_address, other)) =
            self.touches.owned.range(..address + bytes).next_back()
            && other_address + other.bytes > address
        {
            let shared = address.max(other_address);
            faults.push(Fault::TwoLive {
                block: id,
                address: shared,
                other: other.id,
                other_address,
            });
        }
        let mut backed = 0;
        for piece in backings.pieces(address, bytes) {
            backed += piece.bytes;
            self.touches.by_byte.visit(
                piece.physical,
                piece.physical + piece.bytes,
                |start, _, touches| {
                    let is_fine = |past: Use| match stream {
                        Some(stream) => self.is_before(past, stream),
                        None => self.is_over(past),
                    };
                    if let Some(busy) =
                        touches.iter().find(|touch| touch.end > now && !is_fine(touch.by))
                    {
                        let address = piece.address + (start - piece.physical);
                        let stream = stream.map(|key| self.name(key));
                        let on = self.name(busy.by.stream);
                        push_of_block(
                            &mut faults,
                            Fault::HandedOutBusy {
                                block: id,
                                address,
                                stream,
                                previous: busy.block,
                                on,
                            },
                        );
                    }
                },
            );
        }
        if backed < bytes {
            faults.push(Fault::Unbacked { block: id, address: address + backed, backed, bytes });
        }
        self.touches.owned.insert(address, Owned { id, bytes });
        self.report_all(faults);
    }

    /// The program frees the block at `address`.
    pub(crate) fn disowns(&mut self, address: u64) {
        if self.touches.owned.remove(&address).is_none() {
            self.report(Fault::UnknownBlock { address });
        }
    }

    /// A kernel reads and writes a range.
    pub(crate) fn touched(
        &mut self,
        address: u64,
        bytes: u64,
        kernel: Kernel,
        backings: &Backings,
    ) {
        let Kernel { by, start, end } = kernel;
        let stream = self.name(by.stream);
        let mut faults = Vec::new();
        let block = match self.touches.holding(address) {
            Some((at, block)) if address + bytes <= at + block.bytes => block.id,
            _ => {
                faults.push(Fault::TouchedNobodys { address, bytes, stream });
                0
            }
        };
        let mut backed = 0;
        let mut touches = std::mem::take(&mut self.touches.by_byte);
        for piece in backings.pieces(address, bytes) {
            backed += piece.bytes;
            let (first, last) = (piece.physical, piece.physical + piece.bytes);
            let mut parts: Vec<(u64, u64, Vec<Touch>)> = Vec::new();
            touches.visit(first, last, |from, to, past| {
                let unordered: Vec<Touch> = past
                    .iter()
                    .copied()
                    .filter(|touch| !self.is_before(touch.by, by.stream))
                    .collect();
                if let Some(other) = unordered.iter().find(|touch| touch.end > start) {
                    let address = piece.address + (from - piece.physical);
                    let on = self.name(other.by.stream);
                    let previous = other.block;
                    push_of_block(
                        &mut faults,
                        Fault::Race { block, address, stream, previous, on },
                    );
                }
                parts.push((from, to, unordered));
            });
            let touch = Touch { by, end, block, way: piece.address.wrapping_sub(first) };
            let mut next = first;
            for (from, to, mut kept) in parts {
                touches.replace(next, from, vec![touch], |_, _, _| {});
                kept.push(touch);
                touches.replace(from, to, kept, |_, _, _| {});
                next = to;
            }
            touches.replace(next, last, vec![touch], |_, _, _| {});
        }
        self.touches.by_byte = touches;
        if backed < bytes {
            faults.push(Fault::Unbacked { block, address: address + backed, backed, bytes });
        }
        self.report_all(faults);
    }

    /// A driver call takes memory away at the time `now`: no kernel may still use it there. Work
    /// through another mapping of it goes on.
    pub(crate) fn taken_from_kernels(&mut self, call: &'static str, taken: Taken, now: u64) {
        let Taken { address, physical, bytes } = taken;
        let mut faults = Vec::new();
        self.touches.by_byte.visit(physical, physical + bytes, |start, _, touches| {
            let way = address.wrapping_sub(physical);
            let is_busy =
                |touch: &&Touch| touch.way == way && touch.end > now && !self.is_over(touch.by);
            if let Some(busy) = touches.iter().find(is_busy) {
                let address = address + (start - physical);
                let (block, on) = (Some(busy.block), self.name(busy.by.stream));
                push_of_block(&mut faults, Fault::TakenUnderWork { call, address, block, on });
            }
        });
        self.report_all(faults);
    }

    /// Physical memory no longer exists.
    pub(super) fn forget_touches(&mut self, physical: u64, bytes: u64) {
        self.touches.forget(physical, bytes);
    }

    /// Removes a device's blocks with its context.
    pub(crate) fn disowned_within(&mut self, address: u64, bytes: u64) {
        let starts: Vec<u64> =
            self.touches.owned.range(address..address + bytes).map(|(&start, _)| start).collect();
        for start in starts {
            self.touches.owned.remove(&start);
        }
    }
}
