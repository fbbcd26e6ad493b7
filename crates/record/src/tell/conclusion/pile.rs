//! Blocks that pile up within a step, unlike any past step: forwards that keep their graphs though
//! no backward will run through them, and collected results.
//!
//! A training step may well have hundreds of blocks of one line: four operations on it, a layer
//! called twelve times, a cell that runs over time. So no count of blocks is evidence, only torch's
//! facts: whether gradients were on, whether there is an optimiser, which lines a backward has run
//! through.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::callers::{caller, is_input, own};
use super::evidence::{Evidence, is_persistent};
use super::full::LEAST_STEPS;
use super::growth::place;
use super::unmarked;
use super::words::of;
use super::{Cause, Finding};
use crate::gauges::IN_SLABS;
use crate::sites::{By, Frame, Phase, Site, SiteId, Usage, usage};
use crate::{BlockEntry, EventKind};

/// A pile below this share of live memory (one part in so many) is no cause: a step may well hold
/// much of its own.
const LEAST_SHARE: u64 = 4;
/// From this number on, forwards pile up.
const AGAIN: usize = 3;
/// The same of a program that trains: one step may begin with some (views of a contrastive loss).
const AGAIN_IN_A_TRAINING: usize = 6;
/// From this number on, they do even beside a large block that is there once. More than the calls
/// of a layer that a model shares (12 in ALBERT).
const MANY: usize = 16;
/// Share of the forwards' bytes (one part in so many) that may have other counts: the latest
/// forward is still at work.
const UNDER_WAY: u64 = 50;
/// Share of the forwards' bytes (one part in so many) that may be of other forwards.
const REMNANT: u64 = 100;
/// From this number on, blocks of one site are collected.
const COLLECTED: usize = 8;
/// A step has few blocks of a size where a pile has so many times as many.
const FEW: usize = 4;

/// The remedy for unwanted graphs.
pub const NO_GRAD: &[&str] = &[
    "To do: run it in torch.no_grad() or torch.inference_mode(), and of its results keep .item() \
     or .detach().cpu().",
];
const COLLECT: &[&str] = &[
    "To do: move what is collected to the host as it comes (.cpu()), or keep its sum in place of \
     each; if all of it is needed at once, a smaller batch there, or shorter inputs.",
];

/// The blocks of the running step, by site.
type Stacks<'a> = HashMap<SiteId, Stack<'a>>;
type Stack<'a> = Vec<&'a BlockEntry>;

/// The pile, if there is one.
pub fn find(evidence: &Evidence<'_>) -> Option<Finding> {
    forwards(evidence).or_else(|| collected(evidence))
}

/// The blocks of the running step, or of one just over, at sites that `are_meant`. Blocks kept by
/// CUDA graphs are left to that cause.
fn stacks<'a>(evidence: &'a Evidence<'_>, are_meant: impl Fn(SiteId, &Site) -> bool) -> Stacks<'a> {
    let young = evidence.now.saturating_sub(1);
    let mut stacks = Stacks::new();
    for block in evidence.live.iter().filter(|block| block.step >= young && block.capture == 0) {
        if evidence.sites.get(block.site).is_some_and(|site| are_meant(block.site, site)) {
            stacks.entry(block.site).or_default().push(block);
        }
    }
    stacks
}

fn size(blocks: &[&BlockEntry]) -> u64 {
    blocks.iter().map(|block| block.size).sum()
}

/// Its bytes, unless few or usual.
fn much(evidence: &Evidence<'_>, stacks: &Stacks<'_>) -> Option<u64> {
    let blocks: Vec<&BlockEntry> = stacks.values().flatten().copied().collect();
    let whole = size(&blocks);
    let is_much = whole > 0 && whole >= evidence.live_bytes() / LEAST_SHARE;
    (is_much && !is_usual(evidence, &blocks)).then_some(whole)
}

/// Whether a site belongs to a forward with gradients.
fn keeps_graph(site: &Site) -> bool {
    !site.no_grad && site.phase == Phase::Forward && !site.module.is_empty()
}

/// Forwards with gradients in code that was never trained.
fn forwards(evidence: &Evidence<'_>) -> Option<Finding> {
    // The last scores of the training are no part of it.
    let is_untrained = |site: &Site| {
        site.frames.iter().any(|frame| frame.is_own() && evidence.is_untrained(frame))
    };
    let stacks = stacks(evidence, |_, site| keeps_graph(site) && is_untrained(site));
    let whole = much(evidence, &stacks)?;
    let sites: Vec<&Site> =
        main_sites(&stacks, whole).iter().filter_map(|&id| evidence.sites.get(id)).collect();
    let modules: BTreeSet<&str> = sites.iter().map(|site| &*site.module).collect();
    let frame = caller(&sites)?;
    if !evidence.is_untrained(frame) {
        return None;
    }
    let again = if evidence.trains() { AGAIN_IN_A_TRAINING } else { AGAIN };
    let mut count = match passes(stacks.values(), whole) {
        count if count >= again => count,
        _ if is_under_way(evidence, frame) => {
            Some(passes(without_input(&stacks), whole)).filter(|&count| count >= MANY)?
        }
        _ => return None,
    };
    if modules.len() < 2 {
        // A model of functions (`F.relu(...)`) keeps all in one module, as a cache in a module
        // does. A graph keeps inputs as well, and of each forward more than its output; those of
        // the latest forward may be missing.
        let inputs = inputs(evidence, frame, &sites);
        let kept: usize = stacks.values().map(Vec::len).sum();
        if inputs < AGAIN || kept < inputs + (inputs / 2).max(AGAIN) {
            return None;
        }
        count = count.min(inputs);
    }
    let line = stacks.keys().find(|id| evidence.sites.line(**id) == Some(frame));
    let place = evidence.names.frame(frame);
    let told = of(whole, evidence.live_bytes());
    Some(Finding {
        cause: Cause::NoGrad,
        bytes: whole,
        says: format!("{place} keeps the graphs of {count} forwards (no torch.no_grad()?): {told}"),
        advice: NO_GRAD,
        names: line.copied().unwrap_or(SiteId::NONE),
        ..Finding::default()
    })
}

/// The most blocks of one site and size that the function which called the model in `frame` made in
/// the running step: inputs of forwards, if there are many.
fn inputs(evidence: &Evidence<'_>, frame: &Frame, forwards: &[&Site]) -> usize {
    let stacks = stacks(evidence, |_, site| is_input(site, frame, forwards));
    stacks.values().map(|blocks| alike(blocks)).max().unwrap_or(0)
}

/// The most of these blocks that have one size. One line may make a forward's input and its target.
pub fn alike(blocks: &[&BlockEntry]) -> usize {
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for block in blocks {
        *counts.entry(block.requested).or_default() += 1;
    }
    counts.into_values().max().unwrap_or(0)
}

/// The sites of nearly all bytes: a remnant of another forward, or of the one under way, must not
/// hide the line that called them all, nor count as a module of the model.
fn main_sites(stacks: &Stacks<'_>, whole: u64) -> Vec<SiteId> {
    let mut sizes: Vec<(u64, SiteId)> =
        stacks.iter().map(|(&id, blocks)| (size(blocks), id)).collect();
    sizes.sort_unstable();
    let mut left_out = 0;
    let is_remnant = |&(bytes, _): &(u64, SiteId)| {
        left_out += bytes;
        left_out <= whole / REMNANT
    };
    sizes.into_iter().skip_while(is_remnant).map(|(_, id)| id).collect()
}

/// Whether a request was refused in a forward called from `frame`, by code that is no first step:
/// other code was trained.
pub fn is_under_way(evidence: &Evidence<'_>, frame: &Frame) -> bool {
    let refused = evidence.refused.as_ref().and_then(|refused| evidence.sites.get(refused.site));
    let trains = !evidence.state.training.backward_lines.is_empty();
    trains && refused.is_some_and(|site| site.frames.contains(frame))
}

/// The stacks without the largest of those that have one block: the input of the operation under
/// way, which may well be large.
fn without_input<'a, 'b>(stacks: &'b Stacks<'a>) -> impl Iterator<Item = &'b Stack<'a>> {
    let lone = stacks.iter().filter(|(_, blocks)| blocks.len() == 1);
    let input = lone.max_by_key(|(id, blocks)| (size(blocks), **id)).map(|(&id, _)| id);
    stacks.iter().filter(move |(id, _)| Some(**id) != input).map(|(_, blocks)| blocks)
}

/// Forwards with gradients waiting in the running step, at most.
pub fn forwards_at_once(evidence: &Evidence<'_>) -> usize {
    let mut stacks = stacks(evidence, |_, site| keeps_graph(site));
    stacks.values_mut().for_each(|blocks| blocks.retain(|block| block.step == evidence.now));
    let whole = stacks.values().map(|blocks| size(blocks)).sum();
    passes(stacks.values(), whole)
}

/// Runs of the forward, at most: each of its sites has left at least so many blocks.
fn passes<'a: 'b, 'b>(stacks: impl Iterator<Item = &'b Stack<'a>>, whole: u64) -> usize {
    let mut counts: Vec<(usize, u64)> = stacks.map(|blocks| (blocks.len(), size(blocks))).collect();
    counts.sort_unstable();
    let mut left_out = 0;
    for (count, bytes) in counts {
        left_out += bytes;
        if left_out > whole / UNDER_WAY {
            return count;
        }
    }
    0
}

/// Many results of one line, made without gradients: no graph keeps them, so the program does.
fn collected(evidence: &Evidence<'_>) -> Option<Finding> {
    let of_evaluations = of_evaluations(evidence);
    let is_result = |id: SiteId, site: &Site| {
        site.no_grad && site.phase != Phase::Optimizer || of_evaluations.contains(&id)
    };
    let mut stacks = stacks(evidence, is_result);
    stacks.retain(|_, blocks| {
        blocks.retain(|block| !is_persistent(block));
        blocks.len() >= COLLECTED
    });
    let results: Vec<BlockEntry> = stacks.values().flatten().map(|block| **block).collect();
    // One line may have a site in each of many modules.
    let most = usage(&results, evidence.sites, By::Line, evidence.now).into_iter().next()?;
    let Usage { site, bytes: whole, blocks: count, .. } = most;
    let is_of_line = |block: &&BlockEntry| evidence.sites.are_of_one_line(site, block.site);
    let collected: Vec<&BlockEntry> = results.iter().filter(is_of_line).collect();
    let step = collected.iter().map(|block| block.step).max()?;
    let is_made_before =
        evidence.sites.get(site).is_some_and(|site| site.module.is_empty()) && step == 0;
    if is_made_before
        || whole < evidence.live_bytes() / LEAST_SHARE
        || is_usual(evidence, &collected)
        || is_of_one_forward(evidence, &collected)
    {
        return None;
    }
    let place = place(evidence, site);
    let told = of(whole, evidence.live_bytes());
    // What a forward returned, its caller keeps.
    let caller = evidence.callers.of_site(evidence.sites, site);
    let (keeper, made) = match caller {
        Some(caller) => (evidence.names.frame(caller), format!(" of {place}")),
        None => (place, String::new()),
    };
    if evidence.now == 0 {
        // In a server, say, each request may have left one, unless each is of a request under way.
        if evidence.came_and_went(&collected) {
            return None;
        }
        return Some(Finding {
            cause: Cause::Leak,
            bytes: whole,
            says: format!("{keeper} keeps {count} blocks{made} (no step is marked): {told}"),
            advice: unmarked::advice(evidence, site),
            names: site,
            ..Finding::default()
        });
    }
    Some(Finding {
        cause: Cause::Collected,
        bytes: whole,
        says: format!("{keeper} collects {count} blocks{made} within step {step}: {told}"),
        advice: evidence.of_torch(COLLECT, unmarked::PLAIN),
        names: site,
        ..Finding::default()
    })
}

/// Whether blocks may have been made in one call of a `forward`: hidden states of a recurrent net,
/// features of its layers. The forward needs them, and nobody collects them.
///
/// It is over where the refused request is none of it. Several calls are known by a later block
/// of code outside of them (the next one's input), by no older block (none had the input that is
/// still to be read), or by past steps that made a few blocks of this size.
fn is_of_one_forward(evidence: &Evidence<'_>, blocks: &[&BlockEntry]) -> bool {
    let Some(site) = blocks.first().and_then(|block| evidence.sites.get(block.site)) else {
        return false;
    };
    let call = own(site);
    let Some(at) = call.iter().position(|frame| frame.function.ends_with("forward")) else {
        return false;
    };
    let (callers, forward) = (&call[..at], call[at]);
    let is_inside = |site: &Site| {
        let own = own(site);
        own.starts_with(callers)
            && own.get(at).is_some_and(|frame| frame.is_of_function_of(forward))
    };
    let refused = evidence.refused.as_ref().and_then(|refused| evidence.sites.get(refused.site));
    if refused.is_some_and(|site| !is_inside(site)) {
        return false;
    }
    let last = evidence.last_mallocs();
    let own_mallocs = blocks.iter().filter_map(|block| last.get(&block.address));
    let (known, first) = (own_mallocs.clone().count(), own_mallocs.min());
    // Half of them, at least: the events may have no room for the others.
    let Some(first) = first.filter(|_| known >= COLLECTED.max(blocks.len() / 2)) else {
        return false;
    };
    let addresses: HashSet<u64> = blocks.iter().map(|block| block.address).collect();
    let others = evidence.live.iter().filter(|block| !addresses.contains(&block.address));
    let (mut has_older, mut has_outside) = (false, false);
    for block in others {
        let site = evidence.sites.get(block.site);
        let is_later = last.get(&block.address).is_some_and(|at| at > first);
        let is_of_optimizer = site.is_some_and(|site| site.phase == Phase::Optimizer);
        has_older |= !is_later && !is_persistent(block) && !is_of_optimizer;
        // Small blocks have the site of their slab. Another thread may make what it likes.
        let is_outside = |site: &Site| {
            let outermost = own(site).first().copied();
            let is_of_thread = |frame: &Frame| frame.is_of_function_of(call[0]);
            outermost.is_some_and(is_of_thread) && !is_inside(site)
        };
        has_outside |= is_later && block.size > IN_SLABS && site.is_some_and(is_outside);
    }
    has_older && !has_outside && !are_few_in_a_step(evidence, blocks)
}

/// Whether past steps made blocks of the size that most of these have, but a few of them each.
fn are_few_in_a_step(evidence: &Evidence<'_>, blocks: &[&BlockEntry]) -> bool {
    let mut sizes: HashMap<u64, usize> = HashMap::new();
    blocks.iter().for_each(|block| *sizes.entry(block.requested).or_default() += 1);
    let Some((size, count)) = sizes.into_iter().max_by_key(|&(size, count)| (count, size)) else {
        return false;
    };
    // Of the steps that the events have from their beginning on.
    let (mut highest, mut step) = (0, None);
    for event in &evidence.state.events.entries {
        if event.is(EventKind::Step) {
            highest = highest.max(step.unwrap_or(0));
            step = Some(0);
        } else if event.is(EventKind::Malloc) && event.size == size {
            step = step.map(|count| count + 1);
        }
    }
    highest > 0 && count >= highest * FEW
}

/// Whether earlier steps had as much, or all of it is old.
fn is_usual(evidence: &Evidence<'_>, pile: &[&BlockEntry]) -> bool {
    let live = evidence.live_bytes();
    let timeline = &evidence.device.timeline;
    match evidence.now.checked_sub(2) {
        Some(last) => evidence.was_in_a_step(u64::from(last), pile),
        None => timeline
            .get(timeline.len() / 2)
            .is_some_and(|half| half.live_low_bytes.saturating_add(size(pile) / 4) > live),
    }
}

/// The sites of what evaluations in a training make of their outputs, outside of modules. It needs
/// no gradients either, also after the end of `no_grad`, though torch has them on there.
///
/// An evaluation is a function all of whose forwards run without gradients; no backward has run
/// through the line.
fn of_evaluations(evidence: &Evidence<'_>) -> HashSet<SiteId> {
    if evidence.state.training.backward_lines.is_empty() || evidence.now < LEAST_STEPS {
        return HashSet::new();
    }
    let is_forward = |site: &&Site| site.phase == Phase::Forward && !site.module.is_empty();
    let forwards = evidence.sites.iter().map(|(_, site)| site).filter(is_forward);
    let forwards: Vec<(bool, Vec<&Frame>)> =
        forwards.map(|site| (site.no_grad, own(site))).collect();
    let is_of_one = |site: &Site| {
        let Some(line) = site.line().filter(|line| evidence.is_untrained(line)) else {
            return false;
        };
        let mut of_function = forwards
            .iter()
            .filter(|(_, frames)| frames.iter().any(|frame| frame.is_of_function_of(line)))
            .peekable();
        site.phase == Phase::Unknown
            && site.module.is_empty()
            && of_function.peek().is_some()
            && of_function.all(|(no_grad, _)| *no_grad)
    };
    evidence.sites.iter().filter(|(_, site)| is_of_one(site)).map(|(id, _)| id).collect()
}
