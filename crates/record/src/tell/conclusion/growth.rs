//! Growth: blocks left behind step after step.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::callers::{caller, is_input};
use super::evidence::{Evidence, is_persistent};
use super::pile::{self, NO_GRAD};
use super::unmarked;
use super::words::{bytes, of};
use super::{Accused, Advice, Cause, Finding};
use crate::BlockEntry;
use crate::sites::{By, Frame, Growth, Phase, Site, SiteId, Usage, growth, usage};

/// What grew.
#[derive(Default)]
pub struct Grown {
    /// Findings, by cause.
    pub findings: Vec<Finding>,
    /// Sentences about level memory that looks alike.
    pub level: Vec<String>,
}

/// Growth below this share of live memory (one part in so many) is no cause.
const LEAST_SHARE: u64 = 50;
/// A queue below this share (one part in so many) is not worth a sentence, and other memory may
/// hide whether it is level.
const LEVEL_SHARE: u64 = 10;
/// A module with a smaller share of the growth (one part in so many) is no evidence of hooks: a
/// single tensor that a loss keeps brings remnants of others along.
const NOTABLE: u64 = 32;
/// Models have at least this share of their memory in weights (one part in so many), beside
/// gradients and states; and at most this share of other memory.
const WEIGHTS: u64 = 8;
const REMNANT: u64 = 10;
/// Steps, at least, in which a program that trains nothing has made weights.
const LOADS: usize = 6;
/// Steps that have left something, at least, in the first third of those of a cache that fills.
const FILLING: usize = 20;
/// Lines that grow together differ in their first step by at most this.
const TOGETHER: u32 = 2;

/// Lines that grow from about the same first step.
struct Group {
    lines: Vec<(Usage, Growth)>,
}

impl Group {
    fn since(&self) -> u32 {
        self.lines.iter().map(|(_, growth)| growth.since).min().unwrap_or(0)
    }
    fn bytes(&self) -> u64 {
        self.lines.iter().map(|(_, growth)| growth.bytes).sum()
    }
    fn bytes_a_step(&self) -> u64 {
        self.lines.iter().map(|(_, growth)| growth.bytes_a_step).sum()
    }
    /// Its blocks, each with the number of its line. Lines are compared once a site: there may be a
    /// million blocks.
    fn blocks<'a>(
        &self,
        evidence: &'a Evidence<'_>,
    ) -> impl Iterator<Item = (usize, &'a BlockEntry)> {
        let sites = evidence.sites;
        let number = |id| self.lines.iter().position(|(of, _)| sites.are_of_one_line(of.site, id));
        // The site of a line may be one that is not known.
        let known = sites.iter().map(|(id, _)| id).chain(self.lines.iter().map(|(of, _)| of.site));
        let numbers: HashMap<SiteId, usize> =
            known.filter_map(|id| Some((id, number(id)?))).collect();
        let since = self.since();
        let blocks = evidence.live.iter().filter(move |block| block.step >= since);
        blocks.filter_map(move |block| Some((*numbers.get(&block.site)?, block)))
    }
}

/// All growth.
///
/// `are_states_told`: a better finding covers the states of optimisers.
pub fn find(evidence: &Evidence<'_>, are_states_told: bool) -> Grown {
    let mut grown = Grown::default();
    let mut explained: Vec<Group> = Vec::new();
    for group in groups(evidence, are_states_told) {
        // Longer growth is more certain, and is not counted again for the others.
        let steps = u64::from(evidence.now.saturating_sub(group.since()));
        let known: u64 = explained.iter().map(|group| group.bytes_a_step() * steps).sum();
        let rise = evidence.rise(group.since());
        let has_room = !evidence.is_out();
        let comes_and_goes = has_room && evidence.came_back(group.since());
        let is_much = group.bytes() >= evidence.live_bytes() / LEVEL_SHARE;
        if has_room && is_loaded(evidence, &group) {
            continue;
        }
        if has_room && is_filling(evidence, &group) {
            grown.level.extend(is_much.then(|| held(evidence, &group, FILLS)));
        } else if comes_and_goes {
            grown.level.extend(is_much.then(|| held(evidence, &group, WAVE)));
        } else if rise.is_none_or(|rise| rise.saturating_sub(known) >= group.bytes() / 2) {
            explained.push(group);
        } else if is_much {
            grown.level.push(held(evidence, &group, LEVEL));
        }
    }
    grown.level.truncate(1);
    join_models(evidence, &mut explained);
    let much = explained.iter().filter(|group| is_much(evidence, group.bytes()));
    grown.findings = much.map(|group| grows(evidence, group)).collect();
    grown.findings.extend(pile::find(evidence).or_else(|| unmarked::find(evidence)));
    grown
}

/// Joins the gradients and states of models that are kept with the models' weights: they begin with
/// a model's first step, and other lines make them.
fn join_models(evidence: &Evidence<'_>, groups: &mut Vec<Group>) {
    let Some(at) = groups.iter().position(|group| Uses::of(evidence, group).are_models()) else {
        return;
    };
    let mut models = groups.remove(at);
    let of_models = groups
        .extract_if(.., |group| Uses::of(evidence, group).are_of_models())
        .collect::<Vec<_>>();
    models.lines.extend(of_models.into_iter().flat_map(|group| group.lines));
    groups.push(models);
}

/// The growing bytes of a group, by use. What else is live of its lines is not part of it: the
/// gradients and states of the model that is trained are there, too.
#[derive(Default)]
struct Uses {
    weights: u64,
    states: u64,
    gradients: u64,
    others: u64,
    /// The site of the line with most weights.
    line: SiteId,
    /// How many steps have left the same bytes of weights of that line, and how many, if most have.
    times: Option<(usize, u64)>,
}

impl Uses {
    fn of(evidence: &Evidence<'_>, group: &Group) -> Self {
        // By line; bytes by step.
        let mut parts = vec![<[BTreeMap<u32, u64>; 4]>::default(); group.lines.len()];
        for (line, block) in group.blocks(evidence) {
            let [weights, states, gradients, others] = &mut parts[line];
            let part = match evidence.sites.get(block.site) {
                Some(site) if site.phase == Phase::Optimizer => states,
                _ if is_persistent(block) => weights,
                Some(site) if is_of_autograd(site) => gradients,
                _ => others,
            };
            *part.entry(block.step).or_default() += block.size;
        }
        let mut uses = Self::default();
        let mut most = 0;
        for (parts, (usage, _)) in parts.iter().zip(&group.lines) {
            let grown = parts.each_ref().map(|part| growth(part, evidence.now));
            let [weights, states, gradients, others] =
                grown.map(|grown| grown.map_or(0, |grown| grown.bytes));
            uses.weights += weights;
            uses.states += states;
            uses.gradients += gradients;
            uses.others += others;
            if weights > most {
                (most, uses.line) = (weights, usage.site);
                uses.times = grown[0].and_then(|grown| times(&parts[0], grown));
            }
        }
        uses
    }

    fn whole(&self) -> u64 {
        self.weights + self.states + self.gradients + self.others
    }

    /// Weights, maybe with their gradients and states, and hardly anything else.
    fn are_models(&self) -> bool {
        self.are_of_models() && self.weights >= self.whole() / WEIGHTS
    }

    fn are_of_models(&self) -> bool {
        self.whole() > 0 && self.others <= self.whole() / REMNANT
    }

    /// What else is kept of models, in words. Small weights have the site of their slab, which may
    /// be of a gradient's or a state's.
    fn with(&self) -> Option<&'static str> {
        let is_kept = |part: u64| part > self.weights / REMNANT;
        match (is_kept(self.gradients), is_kept(self.states)) {
            (true, true) => Some("with their gradients and states"),
            (true, false) => Some("with their gradients"),
            (false, true) => Some("with their states"),
            (false, false) => None,
        }
    }

    fn are_states(&self) -> bool {
        self.states >= self.whole() - self.whole() / REMNANT
    }

    fn are_gradients(&self) -> bool {
        self.gradients >= self.whole() - self.whole() / REMNANT
    }
}

/// How many steps have left the same, and how much that is, if most have.
fn times(by_step: &BTreeMap<u32, u64>, grown: Growth) -> Option<(usize, u64)> {
    let mut sizes: Vec<u64> = by_step.range(grown.since..).map(|(_, &bytes)| bytes).collect();
    sizes.sort_unstable();
    let median = *sizes.get(sizes.len() / 2)?;
    let alike = sizes.iter().filter(|&&bytes| bytes == median).count();
    (2 * alike > sizes.len()).then_some((alike, median))
}

/// Whether Python copied what lies at a site, for the line of the program that it has.
fn is_copied(site: &Site) -> bool {
    let mut inside = site.frames.iter().take_while(|frame| !frame.is_own());
    inside.any(|frame| frame.file.ends_with("/copy.py"))
}

/// Whether autograd itself made a site's blocks in a backward, and no hook of the program's.
fn is_of_autograd(site: &Site) -> bool {
    site.phase == Phase::Backward && !site.frames.iter().any(Frame::is_own)
}

fn is_much(evidence: &Evidence<'_>, bytes: u64) -> bool {
    bytes >= (evidence.live_bytes() / LEAST_SHARE).max(1)
}

/// The lines with survivors from many steps, oldest first.
fn groups(evidence: &Evidence<'_>, are_states_told: bool) -> Vec<Group> {
    let is_state = |usage: &Usage| {
        evidence.sites.get(usage.site).is_some_and(|site| site.phase == Phase::Optimizer)
    };
    let mut found = usage(&evidence.live, evidence.sites, By::Line, evidence.now);
    found.retain(|usage| !are_states_told || !is_state(usage));
    let mut lines: Vec<(Usage, Growth)> =
        found.into_iter().filter_map(|usage| usage.growth.map(|growth| (usage, growth))).collect();
    lines.sort_by_key(|(_, growth)| growth.since);
    let mut groups: Vec<Group> = Vec::new();
    for (usage, growth) in lines {
        match groups.last_mut() {
            Some(group) if growth.since - group.since() <= TOGETHER => {
                group.lines.push((usage, growth));
            }
            _ => groups.push(Group { lines: vec![(usage, growth)] }),
        }
    }
    for group in &mut groups {
        group.lines.sort_by_key(|(_, growth)| std::cmp::Reverse(growth.bytes));
    }
    groups
}

/// Survivors of many steps that are no growth: what their line does with them, and why.
fn held(evidence: &Evidence<'_>, group: &Group, (does, why): (&str, &str)) -> String {
    let place = place(evidence, group.lines[0].0.site);
    let steps = evidence.now.saturating_sub(group.since());
    format!("{place} {does} {} of the last {steps} steps{why}", bytes(group.bytes()))
}

/// Live memory has not risen.
const LEVEL: (&str, &str) = ("holds", ", and is level: a queue that is full");
const FILLS: (&str, &str) = ("has", ", of ever fewer of them: a cache that fills");
/// Live memory is below what it came back from.
const WAVE: (&str, &str) =
    ("holds", "; as much was live before, and went: load that comes and goes");

/// Whether a group is of the models of a server, each loaded when it is first asked for: the few
/// steps that did so are no rate.
fn is_loaded(evidence: &Evidence<'_>, group: &Group) -> bool {
    if evidence.has_trained() || !Uses::of(evidence, group).are_models() {
        return false;
    }
    let weights = group.blocks(evidence).filter(|(_, block)| is_persistent(block));
    weights.map(|(_, block)| block.step).collect::<BTreeSet<u32>>().len() < LOADS
}

/// Whether ever fewer steps have left something, and of the last third of them clearly fewer than
/// of the first: a cache whose keys recur fills so.
fn is_filling(evidence: &Evidence<'_>, group: &Group) -> bool {
    let (since, steps) = (group.since(), evidence.now.saturating_sub(group.since()));
    let left: BTreeSet<u32> = group.blocks(evidence).map(|(_, block)| block.step).collect();
    let mut thirds = [0usize; 3];
    for step in left {
        let third = 3 * u64::from(step - since) / u64::from(steps.max(1));
        thirds[third.min(2) as usize] += 1;
    }
    thirds[0] >= FILLING && thirds.is_sorted_by(|a, b| a >= b) && thirds[2] <= thirds[0] / 5 * 3
}

/// A growing stack and its blocks.
struct Stack<'a> {
    site: &'a Site,
    blocks: Vec<&'a BlockEntry>,
}

impl Stack<'_> {
    fn steps(&self) -> BTreeSet<u32> {
        self.blocks.iter().map(|block| block.step).collect()
    }
    fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.size).sum()
    }
    /// Number of its blocks per step.
    fn again(&self) -> usize {
        self.blocks.len() / self.steps().len().max(1)
    }
}

/// Classifies a group by the modules that left it.
fn grows(evidence: &Evidence<'_>, group: &Group) -> Finding {
    let (since, rate) = (group.since(), bytes(group.bytes_a_step()));
    let whole = of(group.bytes(), evidence.live_bytes());
    let tail = format!("{rate} a step since step {since}: {whole}");
    let finding = |cause, says, advice| Finding {
        cause,
        bytes: group.bytes(),
        says,
        advice,
        is_of_past_steps: true,
        counts: group.lines.iter().map(|(usage, _)| usage.site).collect(),
        ..Finding::default()
    };
    let uses = Uses::of(evidence, group);
    if uses.are_models() {
        let place = place(evidence, uses.line);
        let (by, advice) = match evidence.sites.get(uses.line).is_some_and(is_copied) {
            true => ("copied", COPIES),
            false => ("made", MODELS),
        };
        let mut says = format!("The weights {by} by {place} are kept");
        if let Some((times, each)) = uses.times {
            says.push_str(&format!(", {times} times {}", bytes(each)));
        }
        let parts = uses.with().into_iter().chain([&*tail]);
        parts.for_each(|part| says.push_str(&format!(", {part}")));
        let accused = evidence.sites.line(uses.line).map(|line| accused(line, group, 0));
        return Finding { names: uses.line, accused, ..finding(Cause::Leak, says, advice) };
    }
    let stacks = stacks(evidence, group);
    if let Some(called) = of_modules(evidence, &stacks) {
        let Called { place, modules, is_graph, has_gradients, is_untrained, site, line } = called;
        let found = match (is_graph, is_untrained) {
            (true, true) => finding(
                Cause::NoGrad,
                format!("{place} keeps graphs (no torch.no_grad()?), {tail}"),
                NO_GRAD,
            ),
            (true, false) => finding(
                Cause::AutogradGraphs,
                format!("{place} keeps graphs of past steps, {tail}"),
                GRAPHS,
            ),
            (false, _) if has_gradients => finding(
                Cause::Hooks,
                format!(
                    "{place} keeps outputs of {modules} modules (hooks, a cache, a sum with its \
                     graph?), {tail}"
                ),
                HOOKS_OR_GRAPHS,
            ),
            (false, _) => finding(
                Cause::Hooks,
                format!("{place} keeps outputs of {modules} modules (hooks, a cache?), {tail}"),
                HOOKS,
            ),
        };
        let accused = line.map(|line| accused(line, group, 0));
        return Finding { names: site, accused, ..found };
    }
    let (first, growth) = &group.lines[0];
    let mut place = place(evidence, first.site);
    // A line that grows beside it by a quarter as much has a part in it.
    let others = || group.lines[1..].iter().filter(|(_, other)| other.bytes >= growth.bytes / 4);
    let more = others().count();
    let other =
        others().next().and_then(|(usage, _)| evidence.names.place(evidence.sites, usage.site));
    let keeps = match (more, other) {
        (0, _) => "keeps",
        (1, Some(other)) => {
            place.push_str(&format!(" and {other}"));
            "keep"
        }
        (more, _) => {
            place.push_str(&format!(" and {more} lines more"));
            "keep"
        }
    };
    let found = if uses.are_gradients() {
        let node = evidence.sites.line(first.site).and_then(Frame::node);
        let made = node.map_or(format!("the backward of {place}"), |_| place);
        let says = format!("Gradients made in {made} are kept, {tail}");
        finding(Cause::Leak, says, GRADIENTS)
    } else if uses.are_states() {
        let says = format!("The optimiser keeps more states with each step ({place}), {tail}");
        finding(Cause::Leak, says, STATES)
    } else if is_like_a_cache(&stacks) {
        finding(Cause::Cache, format!("{place} fills a cache without bound, {tail}"), CACHE)
    } else {
        finding(Cause::Leak, format!("{place} {keeps} {tail}"), leak(evidence))
    };
    let line = evidence.sites.line(first.site);
    let accused = line.map(|line| accused(line, group, more));
    Finding { names: first.site, accused, ..found }
}

fn accused(line: &Frame, group: &Group, more: usize) -> Accused {
    Accused { line: line.clone(), bytes_a_step: group.bytes_a_step(), more }
}

fn leak(evidence: &Evidence<'_>) -> Advice {
    evidence.of_torch(LEAK, unmarked::PLAIN)
}

const LEAK: &[&str] = &[
    "To do: find what keeps that line's result, or a view of it (a list, an attribute, a closure, \
     a reference cycle: gc.collect(), a caught exception: keep str(error)), and bound it; of a \
     loss or a metric store .item(), or a copy on the host (.detach().cpu()).",
];
const CACHE: &[&str] = &[
    "To do: give it a bound (functools.lru_cache(maxsize=...)), or keys that recur (lengths padded \
     to a few); if it is a list of results, keep .item() or .cpu() of each.",
];
const GRAPHS: &[&str] = &[
    "To do: find what keeps a loss, an output or a state with its graph: add up loss.item(), keep \
     .detach() of the others; of a caught exception keep str(error).",
];
const MODELS: &[&str] =
    &["To do: let go of models that are used no more, and of what refers to them (a list, an \
     optimiser, a scheduler), or move those that you keep to the host (.cpu()). If all are in use, \
     as parts of a model that grows, the program needs that much."];
const COPIES: &[&str] =
    &["To do: let go of copies that are used no more, and keep the others on the host (.cpu() of \
     each tensor of state_dict(), and load_state_dict() where one is used)."];
const STATES: &[&str] = &[
    "To do: bound what the optimiser keeps of past steps (of LBFGS, history_size), or let go of \
     optimisers that are used no more; if it only comes to weights that were not trained before, \
     that ends with the last of them.",
];
const GRADIENTS: &[&str] =
    &["To do: find what keeps gradients of past steps (a list of .grad, a hook that stores its \
     argument): keep their norms (.item()), or copies on the host (.detach().cpu())."];
const HOOKS_OR_GRAPHS: &[&str] = &[
    "To do: find what keeps them: a loss or a sum with its graph (add up .item() or .detach()), \
     hooks (handle.remove(), and empty what they fill), a cache of keys and values, a caught \
     exception (keep str(error)). Or keep copies on the host (.detach().cpu()).",
];
const HOOKS: &[&str] =
    &["To do: find what keeps them: a cache of keys and values (drop a session's with it), hooks \
     (handle.remove(), and empty what they fill), a caught exception (keep str(error)). Or keep \
     copies on the host (.detach().cpu())."];

/// The stacks of a group's lines, with the growing blocks.
fn stacks<'a>(evidence: &'a Evidence<'_>, group: &Group) -> Vec<Stack<'a>> {
    let lines: Vec<Option<&Frame>> =
        group.lines.iter().map(|(usage, _)| evidence.sites.line(usage.site)).collect();
    let since = group.since();
    let mut stacks: HashMap<SiteId, Stack<'a>> = HashMap::new();
    for block in evidence.live.iter().filter(|block| block.step >= since) {
        if let Some(site) = evidence.sites.get(block.site)
            && lines.contains(&evidence.sites.line(block.site))
        {
            let stack =
                stacks.entry(block.site).or_insert_with(|| Stack { site, blocks: Vec::new() });
            stack.blocks.push(block);
        }
    }
    // Blocks of only the last steps are in the ordinary course.
    let mut stacks: Vec<Stack<'a>> =
        stacks.into_values().filter(|stack| stack.steps().len() > 2).collect();
    stacks.sort_by_key(|stack| std::cmp::Reverse(stack.bytes()));
    stacks
}

/// Modules that left blocks each time they ran.
struct Called<'a> {
    /// The line that called them all.
    place: String,
    modules: usize,
    /// Whether more is kept than the return value of each module.
    is_graph: bool,
    /// Gradients were on in some, so that a loss or a sum may keep them.
    has_gradients: bool,
    /// Other code was trained, but no backward has run through this.
    is_untrained: bool,
    /// A site of the line itself, if it makes growing blocks too.
    site: SiteId,
    /// The same as `place`.
    line: Option<&'a Frame>,
}

/// The modules, if most of the growth is theirs. Autograd keeps what its backward needs: several
/// blocks of a module, and inputs from outside all modules. A hook keeps the return value of its
/// module, and nothing else.
fn of_modules<'a>(evidence: &Evidence<'_>, stacks: &[Stack<'a>]) -> Option<Called<'a>> {
    let is_inside = |stack: &&Stack<'_>| !stack.site.module.is_empty();
    let inside: Vec<&Stack<'a>> = stacks.iter().filter(is_inside).collect();
    let sum = |stacks: &[&Stack<'_>]| stacks.iter().map(|stack| stack.bytes()).sum::<u64>();
    // Blocks per step, and bytes.
    let mut by_module: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for stack in &inside {
        let (blocks, bytes) = by_module.entry(&stack.site.module).or_default();
        *blocks += stack.again();
        *bytes += stack.bytes();
    }
    if 2 * sum(&inside) < stacks.iter().map(Stack::bytes).sum() {
        return None;
    }
    let sites: Vec<&'a Site> = inside.iter().map(|stack| stack.site).collect();
    let called = caller(&sites);
    let is_untrained = called.is_some_and(|frame| evidence.is_untrained(frame));
    if by_module.len() < 2 {
        // A model of functions keeps all in one module. With the forwards' inputs, and more of each
        // than its output, it is taken for graphs where nothing trains on it: a training may keep
        // as much without its graphs.
        let is_input =
            |stack: &&Stack<'_>| called.is_some_and(|frame| is_input(stack.site, frame, &sites));
        let inputs = |stack: &Stack<'_>| pile::alike(&stack.blocks) / stack.steps().len().max(1);
        let inputs = stacks.iter().filter(is_input).map(inputs).max().unwrap_or(0);
        let kept: usize = by_module.values().map(|&(blocks, _)| blocks).sum();
        if !is_untrained || inputs == 0 || kept < 2 * inputs {
            return None;
        }
    }
    let mut again: Vec<usize> = inside.iter().map(|stack| stack.again()).collect();
    again.sort_unstable();
    let again = again[again.len() / 2];
    let is_outside = |stack: &&Stack<'_>| {
        stack.site.module.is_empty() && matches!(stack.site.phase, Phase::Unknown | Phase::Forward)
    };
    let has_outside = stacks.iter().any(|stack| is_outside(&stack));
    // Without gradients there is no graph.
    let has_graph = inside.iter().any(|stack| !stack.site.no_grad);
    let is_graph =
        has_graph && (has_outside || by_module.values().any(|&(blocks, _)| blocks > again));
    let notable = sum(&inside) / NOTABLE;
    let modules = by_module.values().filter(|&&(_, bytes)| bytes >= notable).count();
    if !is_graph && modules < 2 {
        return None;
    }
    let line = called.or(sites.first().and_then(|site| site.line()));
    let place = line.map_or("The program".to_owned(), |frame| evidence.names.frame(frame));
    let is_of_line = |block: &&&BlockEntry| evidence.sites.line(block.site) == called;
    let mut blocks = stacks.iter().flat_map(|stack| &stack.blocks);
    let site = called.and_then(|_| blocks.find(is_of_line));
    let site = site.map_or(SiteId::NONE, |block| block.site);
    Some(Called { place, modules, is_graph, has_gradients: has_graph, is_untrained, site, line })
}

/// Blocks of ever new sizes.
fn is_like_a_cache(stacks: &[Stack<'_>]) -> bool {
    let Some(first) = stacks.first() else { return false };
    let sizes: BTreeSet<u64> = first.blocks.iter().map(|block| block.size).collect();
    2 * sizes.len() >= first.blocks.len().max(6)
}

/// A site's line, or if unknown, a description of its blocks.
pub(super) fn place(evidence: &Evidence<'_>, site: SiteId) -> String {
    if let Some(place) = evidence.names.place(evidence.sites, site) {
        return place;
    }
    let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
    for block in evidence.live.iter().filter(|block| block.site == site && block.step > 0) {
        *sizes.entry(block.requested).or_default() += block.size;
    }
    match sizes.iter().max_by_key(|&(_, sum)| sum) {
        Some((&size, _)) => format!("What makes blocks of {}", bytes(size)),
        None => "Code that is not known".to_owned(),
    }
}
