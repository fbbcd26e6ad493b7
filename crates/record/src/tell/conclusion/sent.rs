//! Blocks that were sent to other processes: the program may have dropped them long ago, and they
//! stay as long as a receiver has them.

use super::evidence::Evidence;
use super::words::bytes;
use super::{Advice, Cause, Finding};

/// From this share of live memory on (one part in so many), what was sent is worth a sentence.
const LEAST_SHARE: u64 = 20;

const DROP: Advice = &[
    "To do: let go of these blocks here (a list, an attribute) and in the processes that received \
     them (a list there, a queue that they empty too slowly: Queue(maxsize=...)); \
     torch.cuda.ipc_collect() then frees them.",
];

/// The sentence about what was sent, if it is much.
pub fn told(evidence: &Evidence<'_>) -> Option<String> {
    let sent = evidence.device.sent().bytes;
    (sent > 0 && sent >= evidence.live_bytes() / LEAST_SHARE).then(|| {
        format!(
            "{} of what is live was sent to other processes: each block stays until they have \
             dropped it too",
            bytes(sent)
        )
    })
}

/// The remedy, if what the finding is about is mostly blocks that were sent.
pub fn advice(evidence: &Evidence<'_>, finding: &Finding) -> Option<Advice> {
    if !matches!(finding.cause, Cause::Leak | Cause::Cache | Cause::Collected | Cause::Full) {
        return None;
    }
    let (mut all, mut sent) = (0u64, 0u64);
    for block in &evidence.live {
        if !finding.counts(evidence.sites, block.site) {
            continue;
        }
        all = all.saturating_add(block.size);
        sent = sent.saturating_add(if block.is_sent { block.size } else { 0 });
    }
    (sent > all / 2).then_some(DROP)
}
