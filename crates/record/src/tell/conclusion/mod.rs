//! The conclusion about a process's memory, in at most ten lines: its holders, its growth per step
//! and since when, the suspected line of the program, the remedy.
//!
//! Each cause is a function from the [`evidence`] to a finding, weighed by the bytes it explains.
//! The finding that explains most is the conclusion; the others follow.
//!
//! A leak differs from mere size in two ways: its blocks survive from many steps, and the lows of
//! live memory have risen since the first of them. A bounded queue has survivors too, but live
//! memory is level. If two causes look alike, both are named, the likelier first.
#![deny(unsafe_code, clippy::unwrap_used)]

mod again;
mod attempts;
mod callers;
mod cells;
mod device;
mod evidence;
mod full;
mod growth;
mod optimizer;
mod parts;
mod pile;
mod ranks;
mod sent;
mod unmarked;
mod words;

use std::collections::HashSet;

pub use crate::dump::concluded::{Accused, Cause, Conclusion};
pub use crate::dump::concluded::{MOST_COLUMNS, MOST_LINES};
use crate::dump::state::{DeviceState, State};
use crate::sites::{By, Frame, Site, SiteId, Sites, Usage, usage};
use callers::Callers;
pub use evidence::device_of;
use evidence::{Evidence, Refused};
pub use ranks::Rank;
use words::{Names, bytes, percent};

/// Lines about other holders of memory and further causes, at most.
const MOST_HOLDERS: usize = 3;
const MOST_BESIDES: usize = 2;

/// Remedies, in sentences.
type Advice = &'static [&'static str];

/// The finding of one cause.
#[derive(Clone, Debug, Default)]
struct Finding {
    cause: Cause,
    /// Bytes of memory that it explains.
    bytes: u64,
    /// The sentence naming it.
    says: String,
    /// Remedies.
    advice: Advice,
    /// The site of the line in the sentence, if it holds memory.
    names: SiteId,
    /// Whether past steps have left the memory.
    is_of_past_steps: bool,
    /// Sites of other lines whose memory the sentence counts.
    counts: Vec<SiteId>,
    /// The growth in the sentence.
    accused: Option<Accused>,
}

impl Finding {
    /// Whether a site is of the lines whose memory the sentence counts.
    fn counts(&self, sites: &Sites, site: SiteId) -> bool {
        let is_it = |&of: &SiteId| of != SiteId::NONE && sites.are_of_one_line(of, site);
        is_it(&self.names) || self.counts.iter().any(is_it)
    }

    /// Bytes of it that each step has left; 0 if it does not grow, or the line is not known.
    fn bytes_a_step(&self) -> u64 {
        self.accused.as_ref().map_or(0, |accused| accused.bytes_a_step)
    }
}

impl Conclusion {
    /// The conclusion about `state`; `ranks` are those of the same job, this one included, if
    /// others are known.
    pub fn of(state: &State, ranks: &[Rank]) -> Conclusion {
        let Some(evidence) = Evidence::of(state) else {
            return Conclusion {
                cause: Cause::Nothing,
                lines: vec!["No device memory is known of this process.".to_owned()],
                accused: None,
            };
        };
        let twice = optimizer::twice(&evidence);
        let grown = growth::find(&evidence, twice.is_some());
        let mut findings = grown.findings;
        // With growth, the last step is always the highest.
        let is_steady = findings.is_empty();
        findings.extend(device::find(&evidence, is_steady));
        findings.extend(twice);
        findings.extend(cells::find(&evidence));
        let explained = findings.iter().map(|finding| finding.bytes).max().unwrap_or(0);
        findings.extend(ranks::uneven(&evidence, ranks, explained));
        // Stable: among equals, the first in order of search.
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.bytes));
        if let Some(refused) = &evidence.refused {
            kept_first(&evidence, refused, &mut findings);
            left_first(&evidence, refused, &mut findings);
        }
        if let (Some(refused), Some(most)) = (&evidence.refused, findings.first())
            && most.is_of_past_steps
            && full::is_larger_by(&evidence, refused, most.bytes, most.bytes_a_step())
        {
            findings.insert(0, full::find(&evidence, refused));
        }
        let mut findings = findings.into_iter();
        let first = findings.next().unwrap_or_else(|| device::nothing(&evidence));
        let advice = sent::advice(&evidence, &first).unwrap_or(first.advice);
        let mut said = vec![words::sentence(&first.says)];
        // Before all that counts blocks.
        said.extend(state.unrecorded());
        let besides = findings.take(MOST_BESIDES);
        said.extend(besides.map(|finding| format!("Besides: {}", finding.says)));
        said.extend(sent::told(&evidence));
        said.extend(grown.level);
        holders_told(&evidence, &first, &mut said);
        said.extend(evidence.untold());
        let advice: Vec<String> = advice.iter().flat_map(|said| words::wrap(said)).collect();
        let room = MOST_LINES.saturating_sub(advice.len());
        let mut lines: Vec<String> = Vec::new();
        for told in said.iter().map(|said| words::wrap(said)) {
            if lines.len() + told.len() > room {
                break;
            }
            lines.extend(told);
        }
        lines.extend(advice);
        let lines = lines.iter().map(|line| words::fit(line)).collect();
        Conclusion { cause: first.cause, lines, accused: first.accused }
    }
}

/// Puts what past steps have left before a large request that would have fitted without it, as that
/// of `torch.cat` of all that is kept: the remedy is then the first one's. A request of more than
/// all that is live stays the cause.
fn kept_first(evidence: &Evidence<'_>, refused: &Refused, findings: &mut [Finding]) {
    if findings.first().is_none_or(|first| first.cause != Cause::LargeRequest) {
        return;
    }
    let (live, _) = evidence.live_at_refusal(refused);
    let room = evidence.room().saturating_sub(refused.others);
    let is_why = |kept: &Finding| {
        let (bytes, rate) = (kept.bytes, kept.bytes_a_step());
        let without = live.saturating_sub(bytes).saturating_add(refused.asked);
        kept.is_of_past_steps
            && bytes >= live / 2
            && without <= room
            && refused.asked <= live
            && !full::is_larger_by(evidence, refused, bytes, rate)
    };
    if let Some(at) = findings.iter().position(is_why) {
        findings[..=at].rotate_right(1);
    }
}

/// Puts a full device in place of a large request that would have fitted without what an attempt
/// has left that ran out of memory before.
fn left_first(evidence: &Evidence<'_>, refused: &Refused, findings: &mut [Finding]) {
    let is_large = |first: &&mut Finding| first.cause == Cause::LargeRequest;
    let Some(first) = findings.first_mut().filter(is_large) else { return };
    let (live, _) = evidence.live_at_refusal(refused);
    let room = evidence.room().saturating_sub(refused.others);
    let left = attempts::left(evidence);
    let without = live.saturating_sub(left).saturating_add(refused.asked);
    if left >= live / 4 && without <= room {
        *first = full::find(evidence, refused);
    }
}

/// A line or a module with live blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// For users, as short as keeps it distinct.
    pub name: String,
    /// The same in any state of the program: with the whole path of the file.
    pub key: String,
    /// Its memory.
    pub usage: Usage,
    /// For a line in a module's `forward`: its caller, by name.
    pub called: Option<(String, Frame)>,
}

/// The holders of a device's live blocks, largest first.
pub fn holders(state: &State, device: &DeviceState, by: By) -> Vec<Holder> {
    let (live, _) = evidence::blocks(device);
    let now = u32::try_from(device.step).unwrap_or(u32::MAX);
    let names = Names::of(&state.sites);
    let found = usage(&live, &state.sites, by, now).into_iter();
    let callers = Callers::of(&live, &state.sites);
    let holder = |usage: Usage| {
        let site = state.sites.get(usage.site);
        let line = site.and_then(Site::line).filter(|line| line.line > 0);
        let key = match (site, line) {
            (Some(site), _) if by == By::Module && !site.module.is_empty() => site.module.clone(),
            (_, Some(line)) => format!("{}:{} in {}", line.path(), line.line, line.function),
            _ => "not known".to_owned(),
        };
        let called = callers.of_site(&state.sites, usage.site);
        let called = called.map(|frame| (names.frame(frame), frame.clone()));
        Holder { name: names.holder(&state.sites, usage.site), key, usage, called }
    };
    found.map(holder).collect()
}

/// Whether nearly all memory of a line is of one module and phase.
fn is_of_one_kind(evidence: &Evidence<'_>, of: &Usage) -> bool {
    let Evidence { live, sites, .. } = evidence;
    let Some(one) = sites.get(of.site) else { return true };
    let is_other = |&(id, site): &(SiteId, &Site)| {
        (site.phase, &site.module) != (one.phase, &one.module) && sites.are_of_one_line(id, of.site)
    };
    let others: HashSet<SiteId> = sites.iter().filter(is_other).map(|(id, _)| id).collect();
    let others = live.iter().filter(|block| others.contains(&block.site));
    others.map(|block| block.size).sum::<u64>() <= of.bytes / 10
}

/// Adds the largest holders of live memory, a sentence each. Skips the lines whose memory the first
/// finding counts; a line that calls others is named once.
fn holders_told(evidence: &Evidence<'_>, first: &Finding, said: &mut Vec<String>) {
    let Evidence { live, sites, names, now, .. } = evidence;
    let is_told_of = |usage: &&Usage| first.counts(sites, usage.site);
    let found = usage(live, sites, By::Line, *now);
    let has_told = found.iter().any(|usage| is_told_of(&usage));
    // A remnant says nothing.
    let is_much = |usage: &&Usage| usage.bytes >= evidence.live_bytes() / 50;
    let told = found.iter().filter(is_much).filter(|usage| !is_told_of(usage)).take(MOST_HOLDERS);
    let called = |id, said: &[String]| {
        let called = names.frame(evidence.callers.of_site(sites, id)?);
        (!said.iter().any(|said| said.contains(&called))).then_some(called)
    };
    if has_told && let Some(called) = called(first.names, said) {
        said.push(format!("That line is called from {called}"));
    }
    for (number, usage) in told.enumerate() {
        let what = match (number, has_told) {
            (0, false) => "Most is from",
            (0, true) => "Next most is from",
            _ => "then from",
        };
        let base = match number {
            0 => format!(" of the {} live", bytes(evidence.live_bytes())),
            _ => String::new(),
        };
        let blocks = match usage.blocks {
            1 => "1 block".to_owned(),
            count => format!("{count} blocks"),
        };
        let share = percent(usage.bytes, evidence.live_bytes());
        let amount = format!("{} ({share}%{base}), {blocks}", bytes(usage.bytes));
        let about = if is_of_one_kind(evidence, usage) {
            names.holder(sites, usage.site)
        } else {
            names.place(sites, usage.site).unwrap_or_default()
        };
        let whole = format!("{what} {about}: {amount}");
        let called = called(usage.site, said);
        // The line matters more than the module, and its caller too.
        let place = names.place(sites, usage.site);
        said.push(match (place, called) {
            (Some(place), Some(called)) => {
                format!("{what} {place}, called from {called}: {amount}")
            }
            (Some(place), None) if whole.chars().count() > MOST_COLUMNS => {
                format!("{what} {place}: {amount}")
            }
            _ => whole,
        });
    }
}

#[cfg(test)]
mod tests;
