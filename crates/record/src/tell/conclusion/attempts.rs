//! What an attempt left that ran out of memory: the traceback of its exception has its frames, and
//! they have its tensors.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::callers::{caller, own};
use super::evidence::{Evidence, is_persistent};
use crate::sites::{Frame, Phase, Site, SiteId};
use crate::{BlockEntry, EventKind};

/// The remedy.
pub const ADVICE: &[&str] = &[
    "To do: let go of the exception of the earlier out-of-memory, whose traceback keeps what its \
     frames had, or of the list that it filled: retry after the `except` block, and keep no \
     exceptions (str(e) is enough). In a notebook, run `1/0` in a cell of its own, whose exception \
     takes the place of the old one, and then `import gc; gc.collect()`.",
];

/// Refusals that are looked at, at most: the latest.
const MOST_REFUSALS: usize = 64;
/// From this number of blocks on, a line was making one after another when it was refused.
const FILLED: usize = 4;

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

    /// Whether it was made in a forward without gradients, or outside of modules.
    fn is_without_gradients(&self) -> bool {
        match self.site.phase {
            Phase::Forward => self.site.no_grad,
            phase => phase == Phase::Unknown && self.site.module.is_empty(),
        }
    }

    fn is_of_function(&self, frame: &Frame) -> bool {
        self.site.line().is_some_and(|own| own.is_of_function_of(frame))
    }

    /// Whether it may be an input of a forward that `line` calls: made outside of modules, in the
    /// same function.
    fn is_input(&self, line: &Frame) -> bool {
        self.site.module.is_empty() && self.is_of_function(line)
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

/// Bytes that attempts left which ran out of memory before, if any did.
///
/// An out-of-memory alone is no evidence: cuDNN asks for workspaces until one fits.
pub fn left(evidence: &Evidence<'_>) -> u64 {
    let mut refusals: Vec<(usize, SiteId)> =
        evidence.events(EventKind::OutOfMemory).map(|(at, event)| (at, event.site)).collect();
    // The last is the one to be explained.
    refusals.pop();
    if refusals.is_empty() {
        return 0;
    }
    // An address may have had other blocks before.
    let last = evidence.last_mallocs();
    let made = |block: &BlockEntry| {
        let at = *last.get(&block.address).filter(|_| !is_persistent(block))?;
        Some(Made::new(at, block.size, evidence.sites.get(block.site)?))
    };
    let mut blocks: Vec<Made<'_>> = evidence.live.iter().filter_map(made).collect();
    blocks.sort_by_key(|block| block.at);
    let without_gradients = left_without_gradients(evidence, &blocks, &refusals);
    // The last attempt may not even have had room for its first input. (In a forward, the refused
    // request may be of the attempt that was refused before: a smaller workspace.)
    let asked = evidence.refused.as_ref().and_then(|refused| evidence.sites.get(refused.site));
    let asked = asked.filter(|site| site.phase == Phase::Unknown);
    blocks.extend(asked.map(|site| Made::new(usize::MAX, 0, site)));
    // Requests that were refused one after another, as workspaces are, are one refusal.
    refusals.dedup_by_key(|&mut (at, _)| blocks.partition_point(|block| block.at < at));
    refusals
        .into_iter()
        .rev()
        .map(|(refusal, _)| left_at(evidence, &blocks, refusal))
        .find(|&bytes| bytes > 0)
        .unwrap_or(0)
        .max(without_gradients)
}

/// Bytes that an attempt left whose forward ran without gradients, or that called no module.
///
/// No graph keeps what it made, and a program may well keep results, or caches, of what succeeded.
/// So an attempt is what was live when a request was refused, the newest first, as far as it is
/// live still. Where the exception was let go of, or the forward went on, the newest is not.
fn left_without_gradients(
    evidence: &Evidence<'_>,
    blocks: &[Made<'_>],
    refusals: &[(usize, SiteId)],
) -> u64 {
    let is_live: HashMap<usize, &Made<'_>> = blocks.iter().map(|block| (block.at, block)).collect();
    let first = refusals.len().saturating_sub(MOST_REFUSALS);
    let mut refusals = refusals[first..].iter().peekable();
    // What is live at this point of the events, by malloc; and the malloc of an address.
    let (mut then, mut mallocs) = (BTreeSet::new(), HashMap::new());
    // The refusal after which nothing was asked for yet, with the newest of what was live.
    let mut last: Option<(usize, SiteId, Option<usize>)> = None;
    let (mut most, mut begin) = (0, 0);
    for (at, event) in evidence.state.events.entries.iter().enumerate() {
        if u32::from(event.device) != evidence.device.device {
            continue;
        }
        // Frames that an exception keeps have no temporaries of expressions: those go at once.
        if event.is_request()
            && let Some((refusal, site, newest)) = last.take()
        {
            if newest.is_some_and(|newest| is_live.contains_key(&newest)) {
                let newest = then.range(begin..).rev();
                let kept: Vec<&Made<'_>> =
                    newest.map_while(|at| is_live.get(at).copied()).collect();
                let refused = evidence.sites.get(site);
                let left = |refused| {
                    let after = blocks.partition_point(|block| block.at < refusal);
                    begun_anew(refused, &kept, &blocks[after..]).max(filled(refused, &kept, blocks))
                };
                most = most.max(refused.map_or(0, left));
            }
            begin = refusal;
        }
        if event.is(EventKind::Malloc) {
            then.insert(at);
            mallocs.insert(event.address, at);
        } else if event.is(EventKind::Free) {
            if let Some(at) = mallocs.remove(&event.address) {
                then.remove(&at);
            }
        } else if let Some(&(_, site)) = refusals.next_if(|&&(refusal, _)| refusal == at) {
            last = Some((at, site, then.last().copied()));
        }
    }
    most
}

/// Bytes of what is `kept` of an attempt that was `refused` a request, the newest first, if the
/// next one began as it did.
fn begun_anew(refused: &Site, kept: &[&Made<'_>], after: &[Made<'_>]) -> u64 {
    let Some((first, place)) = after.iter().find_map(|block| Some((block, block.place?))) else {
        return 0;
    };
    let Some(begin) = kept.iter().position(|block| block.place == Some(place)) else { return 0 };
    let attempt = &kept[..=begin];
    let has_forward = attempt.iter().any(|block| !block.site.module.is_empty());
    // Else it may have been refused its first input, and what was kept is of one that succeeded.
    let is_within = match has_forward {
        true => !refused.module.is_empty(),
        false => own(refused).iter().any(|frame| first.is_of_function(frame)),
    };
    let is_meant = is_within
        && self::place(refused) != Some(place)
        && attempt.iter().all(|block| block.is_without_gradients());
    if is_meant { sum(attempt) } else { 0 }
}

/// Bytes of what is `kept`, the newest first, of a line outside of modules that made one block
/// after another until it was `refused` a request; all that it ever made.
fn filled(refused: &Site, kept: &[&Made<'_>], blocks: &[Made<'_>]) -> u64 {
    if refused.phase != Phase::Unknown || !refused.module.is_empty() {
        return 0;
    }
    let Some(place) = place(refused) else { return 0 };
    let is_of_line = |block: &Made<'_>| block.place == Some(place);
    let count = kept.iter().take_while(|block| is_of_line(block)).count();
    let is_all =
        count >= FILLED && blocks.iter().filter(|block| is_of_line(block)).count() == count;
    if is_all { sum(&kept[..count]) } else { 0 }
}

fn sum(blocks: &[&Made<'_>]) -> u64 {
    blocks.iter().fold(0, |sum, block| sum.saturating_add(block.bytes))
}

/// Bytes of activations and gradients that an attempt left: made since the last completed step and
/// before this out-of-memory, after which the forward began anew, so that its first line, or that
/// of an input, has made another block. `blocks` are in the order in which they were made.
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
