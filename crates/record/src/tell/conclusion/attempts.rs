//! What an attempt left that ran out of memory: the traceback of its exception has its frames, and
//! they have its tensors.

use std::collections::{HashMap, HashSet};

use super::callers::caller;
use super::evidence::{Evidence, is_persistent};
use crate::sites::{Frame, Phase, Site};
use crate::{BlockEntry, EventKind};

/// The remedy.
pub const ADVICE: &[&str] = &[
    "To do: let go of the exception of the earlier out-of-memory, whose traceback keeps what its \
     frames had: retry after the `except` block, and keep no exceptions (str(e) is enough). In a \
     notebook, run `1/0` in a cell of its own, whose exception takes the place of the old one, and \
     then `import gc; gc.collect()`.",
];

/// A place in the program: the module, its line, and the line that calls the model.
type Place<'a> = (&'a str, Option<&'a Frame>, Option<&'a Frame>);

/// A live block that the events know, with its number among them; or the refused request.
struct Made<'a> {
    at: usize,
    bytes: u64,
    site: &'a Site,
    place: Option<Place<'a>>,
}

impl<'a> Made<'a> {
    fn new(at: usize, bytes: u64, site: &'a Site) -> Self {
        Self { at, bytes, site, place: place(site) }
    }

    /// Whether a pass of autograd's made it.
    fn is_passed(&self) -> bool {
        !self.site.no_grad && matches!(self.site.phase, Phase::Forward | Phase::Backward)
    }

    /// Whether it may be an input of a forward that `line` calls: made outside of modules, in the
    /// same function.
    fn is_input(&self, line: &Frame) -> bool {
        self.site.module.is_empty()
            && self.site.line().is_some_and(|own| own.is_of_function_of(line))
    }
}

/// A site's place, whoever called the function that calls the model: a notebook runs the same
/// function from another cell, a script from its `except` block. Of a module that a cell itself
/// calls, the module alone: with another batch the cell is another file.
fn place(site: &Site) -> Option<Place<'_>> {
    let is_told = |frame: &&Frame| {
        site.module.is_empty() || !(frame.is_cell() && frame.function == "<module>")
    };
    let line = site.line()?;
    Some((&site.module, Some(line).filter(is_told), caller(&[site]).filter(is_told)))
}

/// Bytes of activations and gradients that an attempt left: made before an earlier out-of-memory,
/// after which the forward began anew, so that its first line, or that of an input, has made
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
    let last: HashMap<u64, usize> = mallocs.map(|(at, event)| (event.address, at)).collect();
    let made = |block: &BlockEntry| {
        let at = *last.get(&block.address).filter(|_| !is_persistent(block))?;
        Some(Made::new(at, block.size, evidence.sites.get(block.site)?))
    };
    let mut blocks: Vec<Made<'_>> = evidence.live.iter().filter_map(made).collect();
    blocks.sort_by_key(|block| block.at);
    // The last attempt may not even have had room for its first input. (In a forward, the refused
    // request may be of the attempt that was refused before: a smaller workspace.)
    let asked = evidence.refused.as_ref().and_then(|refused| evidence.sites.get(refused.site));
    let asked = asked.filter(|site| site.phase == Phase::Unknown);
    blocks.extend(asked.map(|site| Made::new(usize::MAX, 0, site)));
    // Requests that were refused one after another, as workspaces are, are one refusal.
    refusals.dedup_by_key(|at| blocks.partition_point(|block| block.at < *at));
    refusals
        .into_iter()
        .rev()
        .map(|refusal| left_at(evidence, &blocks, refusal))
        .find(|&bytes| bytes > 0)
        .unwrap_or(0)
}

/// As [`left`], of the attempts since the last completed step that ended by this out-of-memory or
/// before it; `blocks` are in the order in which they were made.
fn left_at(evidence: &Evidence<'_>, blocks: &[Made<'_>], refusal: usize) -> u64 {
    let steps = evidence.state.events.entries[..refusal].iter();
    let step = steps.rev().position(|event| event.kind == EventKind::Step.name());
    let begin = step.map_or(0, |back| refusal - back);
    let from = |at: usize| blocks.partition_point(|block| block.at < at);
    let (before, after) = (&blocks[from(begin)..from(refusal)], &blocks[from(refusal)..]);
    let is_forward = |block: &&Made<'_>| block.is_passed() && block.site.phase == Phase::Forward;
    let first =
        before.iter().find(is_forward).or_else(|| before.iter().find(|block| block.is_passed()));
    let Some(first) = first else { return 0 };
    let called = caller(&[first.site]);
    let is_input = |block: &Made<'_>| called.is_some_and(|line| block.is_input(line));
    // Later attempts may have had room for inputs only.
    let opens =
        |block: &&Made<'_>| block.place == first.place && block.is_passed() || is_input(block);
    let again: HashSet<_> = after.iter().filter(opens).filter_map(|block| block.place).collect();
    let is_again = |block: &Made<'_>| block.place.is_some_and(|place| again.contains(&place));
    if !before.iter().filter(opens).any(&is_again) {
        return 0;
    }
    let is_left = |block: &&Made<'_>| block.is_passed() || is_input(block) && is_again(block);
    before.iter().filter(is_left).fold(0, |sum, block| sum.saturating_add(block.bytes))
}
