//! A model that is made again while the first one lives, as a server does that reloads.

use std::collections::HashMap;

use super::evidence::{Evidence, Refused, is_persistent};
use crate::BlockEntry;
use crate::gauges::IN_SLABS;

/// The remedy.
pub const ADVICE: &[&str] = &[
    "To do: if a model is loaded anew, let go of the old one first (del, gc.collect()), or load \
     the new weights to the host and into it (load_state_dict() copies in place). If more models \
     or adapters are loaded as requests come, keep fewer and drop the least used.",
];

/// Events between the making of one model and of the next, at least.
const APART: usize = 64;
/// How many times as many these are as between two other blocks.
const ALONE: usize = 8;
/// Blocks that repeat others, at least, and the share of live memory (one part in so many).
const LEAST: usize = 4;
const LEAST_SHARE: u64 = 10;
/// The share of what is new (one part in so many) that may be no copy: a temporary.
const REMNANT: u64 = 10;

/// Bytes of the newest blocks that repeat weights, line by line and size by size, if a request was
/// refused while they were made. Of a program that trains nothing: a training has states of as many
/// bytes as its weights.
pub fn made_again(evidence: &Evidence<'_>, refused: &Refused) -> Option<u64> {
    if evidence.has_trained() {
        return None;
    }
    let last = evidence.last_mallocs();
    // What the events do not know any more is older.
    let at = |block: &BlockEntry| last.get(&block.address).map_or(0, |at| at + 1);
    let mut blocks: Vec<(usize, &BlockEntry)> = evidence.live.iter().map(|b| (at(b), b)).collect();
    blocks.retain(|(_, block)| block.size > IN_SLABS);
    blocks.sort_by_key(|&(at, _)| at);
    // The longest time without a block that stays, far longer than any other: requests lie between
    // the two, and not what loading a layer needs for a moment.
    let mut gaps: Vec<(usize, usize)> =
        blocks.windows(2).map(|pair| pair[1].0 - pair[0].0).zip(1..).collect();
    gaps.sort_unstable();
    let (gap, begin) = gaps.pop()?;
    if gap < APART || gaps.last().is_some_and(|&(next, _)| gap / ALONE < next) {
        return None;
    }
    let (old, new) = blocks.split_at(begin);
    let key = |block: &BlockEntry| Some((evidence.sites.line(block.site)?, block.size));
    let mut weights: HashMap<_, u64> = HashMap::new();
    for key in old.iter().filter(|(_, block)| is_persistent(block)).filter_map(|(_, b)| key(b)) {
        *weights.entry(key).or_default() += 1;
    }
    let asked = evidence.sites.line(refused.site)?;
    if !weights.keys().any(|&(line, _)| line == asked) {
        return None;
    }
    let (mut count, mut again, mut all) = (0, 0u64, 0u64);
    for (_, block) in new {
        all = all.saturating_add(block.size);
        if let Some(left) = key(block).and_then(|key| weights.get_mut(&key))
            && *left > 0
        {
            *left -= 1;
            count += 1;
            again = again.saturating_add(block.size);
        }
    }
    let is_much = count >= LEAST && again >= evidence.live_bytes() / LEAST_SHARE;
    (is_much && again >= all - all / REMNANT).then_some(again)
}
