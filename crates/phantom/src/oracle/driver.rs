//! Driver calls that hand memory out or take it away.

use crate::backing::Backing;
use crate::calls::CallKind;
use crate::oracle::Oracle;
use crate::oracle::content::{Content, Past, Use, Uses};
use crate::oracle::fault::{Fault, Taker};
use crate::streams::StreamKey;

/// Physical memory that a call takes away, and its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) address: u64,
    pub(crate) physical: u64,
    pub(crate) bytes: u64,
}

impl Taken {
    /// A whole backed range.
    pub(crate) fn of(backing: &Backing) -> Self {
        Self { address: backing.address, physical: backing.physical, bytes: backing.bytes }
    }
}

impl Oracle {
    /// A pool hands memory out, usable in the order of `stream`; other streams need that position
    /// first.
    pub(crate) fn pool_handed_out(&mut self, physical: u64, bytes: u64, stream: StreamKey) {
        let uses = Uses::One(self.advance(stream));
        let content = Content::Past(Past { id: None, capture: 0, uses });
        self.physical.replace(physical, physical + bytes, content, |_, _, _| {});
    }

    /// A pool takes memory back in the order of `stream`; all uses must come before.
    pub(crate) fn pool_took_back(&mut self, taken: Taken, stream: StreamKey) {
        let Taken { physical, bytes, .. } = taken;
        let faults = self.judge_taking(taken, CallKind::PoolFree.name(), |oracle, past| {
            oracle.is_before(past, stream)
        });
        self.report_all(faults);
        let uses = Uses::One(self.advance(stream));
        let content = Content::Past(Past { id: None, capture: 0, uses });
        let mut live = Vec::new();
        self.physical.replace(physical, physical + bytes, content, |from, to, old| {
            if matches!(old, Content::Live(_)) {
                live.push((from, to, old.clone()));
            }
        });
        // A live block stays in the map, so that the next block in its memory is a fault too.
        for (from, to, block) in live {
            self.physical.replace(from, to, block, |_, _, _| {});
        }
    }

    /// A pool returns a chunk to the device. Its own frees are complete then, so only a live block
    /// in the chunk can be a fault.
    pub(crate) fn pool_gave_back(&mut self, call: &'static str, taken: Taken) {
        let faults = self.judge_taking(taken, call, |_, _| true);
        self.report_all(faults);
        self.physical.clear(taken.physical, taken.physical + taken.bytes, |_, _, _| {});
        self.forget_touches(taken.physical, taken.bytes);
    }

    /// Plain memory is freed, after the implied wait.
    pub(crate) fn plain_freed(&mut self, taken: Taken) {
        let faults =
            self.judge_taking(taken, CallKind::Free.name(), |oracle, past| oracle.is_over(past));
        self.report_all(faults);
        self.physical.clear(taken.physical, taken.physical + taken.bytes, |_, _, _| {});
        self.forget_touches(taken.physical, taken.bytes);
    }

    /// A mapping is removed: all work through its addresses must be over, and the host must know.
    pub(crate) fn unmapped(&mut self, address: u64, bytes: u64) {
        let mut mapped = std::mem::take(&mut self.mapped);
        let mut faults = Vec::new();
        mapped.clear(address, address + bytes, |start, _, content| {
            let fault = self
                .judge(content, start, CallKind::Unmap.name(), |oracle, past| oracle.is_over(past));
            push_new(&mut faults, fault);
        });
        self.mapped = mapped;
        self.report_all(faults);
    }

    /// Physical memory no longer exists: released, and mapped nowhere.
    pub(crate) fn vanished(&mut self, physical: u64, bytes: u64) {
        self.physical.clear(physical, physical + bytes, |_, _, _| {});
        self.forget_touches(physical, bytes);
    }

    fn judge_taking(
        &self,
        taken: Taken,
        call: &'static str,
        is_fine: impl Fn(&Oracle, Use) -> bool,
    ) -> Vec<Fault> {
        let Taken { address, physical, bytes } = taken;
        let mut faults = Vec::new();
        self.physical.visit(physical, physical + bytes, |start, _, content| {
            let fault = self.judge(content, address + (start - physical), call, &is_fine);
            push_new(&mut faults, fault);
        });
        faults
    }

    fn judge(
        &self,
        content: &Content,
        address: u64,
        call: &'static str,
        is_fine: impl Fn(&Oracle, Use) -> bool,
    ) -> Option<Fault> {
        match content {
            Content::Live(live) => Some(Fault::TakenUnderLive { call, address, block: live.id }),
            Content::Past(past) if self.may_replay(past.capture) => {
                Some(Fault::GraphMemory { by: Taker::Call(call), address, capture: past.capture })
            }
            Content::Past(past) => {
                let replays = self.replays(past.capture);
                let open = past
                    .uses
                    .as_slice()
                    .iter()
                    .chain(replays)
                    .find(|&&past| !is_fine(self, past))?;
                Some(Fault::TakenUnderWork {
                    call,
                    address,
                    block: past.id,
                    on: self.name(open.stream),
                })
            }
        }
    }

    pub(super) fn report_all(&mut self, faults: Vec<Fault>) {
        for fault in faults {
            self.report(fault);
        }
    }
}

/// Adds one fault per block, for any number of its pieces.
fn push_new(faults: &mut Vec<Fault>, fault: Option<Fault>) {
    let about = |fault: &Fault| match *fault {
        Fault::TakenUnderLive { block, .. } => (1, block),
        Fault::TakenUnderWork { block, .. } => (2, block.unwrap_or(u64::MAX)),
        Fault::GraphMemory { capture, .. } => (3, capture),
        _ => (0, 0),
    };
    if let Some(fault) = fault
        && faults.last().is_none_or(|last| about(last) != about(&fault))
    {
        faults.push(fault);
    }
}
