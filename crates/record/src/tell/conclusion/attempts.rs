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
    let mut refusals: Vec<usize> =
        evidence.events(EventKind::OutOfMemory).map(|(at, _)| at).collect();
    // The last is the one to be explained.
    refusals.pop();
    if refusals.is_empty() {
        return 0;
    }
    // An address may have had other blocks before.
    let mallocs = evidence.events(EventKind::Malloc);
    let made: HashMap<u64, usize> = mallocs.map(|(at, event)| (event.address, at)).collect();
    let is_passed =
        |site: &Site| !site.no_grad && matches!(site.phase, Phase::Forward | Phase::Backward);
    let made_at = |block: &BlockEntry| {
        let at = *made.get(&block.address).filter(|_| !is_persistent(block))?;
        Some((at, block.site, evidence.sites.get(block.site)?, block.size))
    };
    let blocks: Vec<(usize, SiteId, &Site, u64)> =
        evidence.live.iter().filter_map(made_at).collect();
    let passed = blocks.iter().filter(|(_, _, site, _)| is_passed(site));
    let Some(&(_, first, forward, _)) = passed.min_by_key(|&&(at, ..)| at) else { return 0 };
    let called = caller(&[forward]);
    // Later attempts may have had room for inputs only.
    let is_first = |id: SiteId, site: &Site| {
        id == first || called.is_some_and(|line| is_input(site, line, &[forward]))
    };
    // The sites at which the forward begins: the places of their first and last block.
    let mut begins: HashMap<SiteId, Option<(usize, usize)>> = HashMap::new();
    for &(at, id, site, _) in &blocks {
        let places = begins.entry(id).or_insert_with(|| is_first(id, site).then_some((at, at)));
        *places = places.map(|(from, to)| (from.min(at), to.max(at)));
    }
    begins.retain(|_, places| places.is_some());
    let begins_anew =
        |refusal: &usize| begins.values().flatten().any(|(from, to)| (from..to).contains(&refusal));
    let Some(refusal) = refusals.into_iter().rev().find(begins_anew) else { return 0 };
    let is_left = |&&(at, id, site, _): &&(usize, SiteId, &Site, u64)| {
        at < refusal && (is_passed(site) || begins.contains_key(&id))
    };
    blocks.iter().filter(is_left).fold(0, |sum, &(_, _, _, size)| sum.saturating_add(size))
}
