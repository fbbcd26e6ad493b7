//! What an attempt left that ran out of memory: the traceback of its exception has its frames, and
//! they have its tensors.

use std::collections::HashMap;

use super::callers::{caller, is_input};
use super::evidence::{Evidence, is_persistent};
use crate::sites::{Phase, Site, SiteId};
use crate::{BlockEntry, EventKind};

/// The remedy.
pub const ADVICE: &[&str] = &[
    "To do: let go of the exception of the earlier out-of-memory, whose traceback keeps what its \
     frames had: retry after the `except` block, keep no exceptions (str(e) is enough), and in a \
     notebook restart, or run `del sys.last_value, sys.last_traceback` (also sys.last_exc), \
     `gc.collect()`.",
];

/// Bytes of activations and gradients that an attempt left: made before an earlier out-of-memory,
/// after which the forward began anew, so that its first site, or that of an input, has made
/// another block.
///
/// An out-of-memory alone is no evidence: cuDNN asks for workspaces until one fits.
pub fn left(evidence: &Evidence<'_>) -> u64 {
    let entries = evidence.state.events.entries.iter().enumerate();
    let entries = entries.filter(|(_, event)| u32::from(event.device) == evidence.device.device);
    // An address may have had other blocks before.
    let (mut made, mut refusals) = (HashMap::new(), Vec::new());
    for (place, event) in entries {
        if event.kind == EventKind::Malloc.name() {
            made.insert(event.address, place);
        } else if event.kind == EventKind::OutOfMemory.name() {
            refusals.push(place);
        }
    }
    // The last is the one to be explained.
    refusals.pop();
    let is_passed =
        |site: &Site| !site.no_grad && matches!(site.phase, Phase::Forward | Phase::Backward);
    let made_at = |block: &BlockEntry| {
        let at = *made.get(&block.address).filter(|_| !is_persistent(block))?;
        Some((at, block.site, evidence.sites.get(block.site)?, block.size))
    };
    let mut blocks: Vec<(usize, SiteId, &Site, u64)> =
        evidence.live.iter().filter_map(made_at).collect();
    blocks.sort_unstable_by_key(|&(at, ..)| at);
    let first = blocks.iter().find(|(_, _, site, _)| is_passed(site));
    let Some((first, forward)) = first.map(|&(_, id, site, _)| (id, site)) else { return 0 };
    // Later attempts may have had room for inputs only.
    let called = caller(&[forward]);
    let is_first = |id: SiteId, site: &Site| {
        id == first || called.is_some_and(|line| is_input(site, line, &[forward]))
    };
    blocks.retain(|&(_, id, site, _)| is_passed(site) || is_first(id, site));
    let begins_anew = |refusal: &usize| {
        let (before, after) = blocks.split_at(blocks.partition_point(|(at, ..)| at < refusal));
        let is_again = |id: SiteId| before.iter().any(|&(_, other, ..)| other == id);
        after.iter().any(|&(_, id, site, _)| is_first(id, site) && is_again(id))
    };
    let Some(refusal) = refusals.into_iter().rev().find(begins_anew) else { return 0 };
    let before = blocks.iter().take_while(|&&(at, ..)| at < refusal);
    before.fold(0, |sum, &(_, _, _, size)| sum.saturating_add(size))
}
