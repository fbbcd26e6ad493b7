//! What a process's memory comes to, in at most ten lines: what held it, what grew since when by
//! how much a step, which line of the program to suspect, what to do.
//!
//! Each cause is a function from what is known ([`evidence`]) to what it found, weighed by the
//! bytes that it explains. What explains most is the conclusion; others are told after it.
//!
//! How a leak is told from what is only large: its blocks survive from many steps, and the lows of
//! live memory have risen since the first of them. A bounded queue has survivors too, but live
//! memory is level. What two causes look alike in, both are named, the likelier first.
#![deny(unsafe_code, clippy::unwrap_used)]

mod device;
mod evidence;
mod full;
mod growth;
mod optimizer;
mod pile;
mod ranks;
mod words;

use serde::{Deserialize, Serialize};

use crate::dump::state::{DeviceState, State};
use crate::sites::{By, Site, Usage, usage};
use evidence::Evidence;
pub use ranks::Rank;
pub use words::MOST_COLUMNS;
use words::{Names, bytes, percent};

/// Lines of a conclusion at most.
pub const MOST_LINES: usize = 10;
/// What is told of others than the cause: holders of memory, and further causes.
const MOST_HOLDERS: usize = 3;
const MOST_BESIDES: usize = 2;

/// What made memory go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nothing grows, and no request was refused.
    #[default]
    Nothing,
    /// A line leaves blocks behind step after step.
    Leak,
    /// The same, of ever new sizes or not in every step.
    Cache,
    /// The graphs of autograd of past steps are kept.
    AutogradGraphs,
    /// Hooks keep outputs of modules.
    Hooks,
    /// Graphs of autograd pile up where no step is made.
    NoGrad,
    /// Many blocks of one line pile up within a step.
    Collected,
    /// The states of an optimiser are there twice.
    OptimizerTwice,
    /// One rank holds much more than others.
    UnevenRanks,
    /// One request is large beside all else.
    LargeRequest,
    /// Others hold much of the device.
    Others,
    /// The ceiling is reached, and the device has room.
    Ceiling,
    /// CUDA graphs hold memory of their own.
    CudaGraphs,
    /// What is freed waits for other streams.
    Streams,
    /// Free memory lies in pieces between blocks.
    Pieces,
    /// The device is full of live blocks, and nothing grows.
    Full,
}

/// What it comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conclusion {
    /// The cause that the first line names.
    pub cause: Cause,
    /// At most [`MOST_LINES`], of at most [`MOST_COLUMNS`] columns.
    pub lines: Vec<String>,
}

/// What one cause has to say.
#[derive(Clone, Debug, Default)]
struct Finding {
    cause: Cause,
    /// How much of the memory it explains.
    bytes: u64,
    /// The sentence that names it.
    says: String,
    /// What to do about it, in sentences.
    advice: &'static [&'static str],
}

impl Conclusion {
    /// What `state` comes to; `ranks` are those of the same job, this one included, where others
    /// are known.
    pub fn of(state: &State, ranks: &[Rank]) -> Conclusion {
        let Some(evidence) = Evidence::of(state) else {
            return Conclusion {
                cause: Cause::Nothing,
                lines: vec!["No device memory is known of this process.".to_owned()],
            };
        };
        let twice = optimizer::twice(&evidence);
        let grown = growth::find(&evidence, twice.is_some());
        let mut findings = grown.findings;
        // Where something grows, the last step is the highest of itself.
        let is_steady = findings.is_empty();
        findings.extend(device::find(&evidence, is_steady));
        findings.extend(twice);
        findings.extend(ranks::uneven(&evidence, ranks));
        // Stable: of equals, the one that was looked for first.
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.bytes));
        let mut findings = findings.into_iter();
        let first = findings.next().unwrap_or_else(|| device::nothing(&evidence));
        let mut lines = words::wrap(&first.says);
        let besides = findings.take(MOST_BESIDES);
        lines
            .extend(besides.flat_map(|finding| words::wrap(&format!("Besides: {}", finding.says))));
        if first.cause == Cause::Full {
            lines.extend(full::parts(&evidence));
        }
        lines.extend(grown.level);
        lines.extend(most(&evidence));
        lines.extend(evidence.untold());
        let advice: Vec<String> = first.advice.iter().flat_map(|said| words::wrap(said)).collect();
        lines.truncate(MOST_LINES.saturating_sub(advice.len()));
        lines.extend(advice);
        let lines = lines.iter().map(|line| words::fit(line)).collect();
        Conclusion { cause: first.cause, lines }
    }
}

/// A line or a module that holds live blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// For people, as short as tells it from the others.
    pub name: String,
    /// The same in any state of the program: with the whole path of the file.
    pub key: String,
    /// What it holds.
    pub usage: Usage,
}

/// What holds the live blocks of a device, the largest first.
pub fn holders(state: &State, device: &DeviceState, by: By) -> Vec<Holder> {
    let (live, _) = evidence::blocks(device);
    let now = u32::try_from(device.step).unwrap_or(u32::MAX);
    let names = Names::of(&state.sites);
    let found = usage(&live, &state.sites, by, now).into_iter();
    let holder = |usage: Usage| {
        let site = state.sites.get(usage.site);
        let line = site.and_then(Site::line).filter(|line| line.line > 0);
        let key = match (site, line) {
            (Some(site), _) if by == By::Module && !site.module.is_empty() => site.module.clone(),
            (_, Some(line)) => format!("{}:{} in {}", line.file, line.line, line.function),
            _ => "not known".to_owned(),
        };
        Holder { name: names.holder(&state.sites, usage.site), key, usage }
    };
    found.map(holder).collect()
}

/// What holds most of what is live, a line each.
fn most(evidence: &Evidence<'_>) -> Vec<String> {
    let Evidence { live, sites, names, now, .. } = evidence;
    let found = usage(live, sites, By::Line, *now);
    let line = |(number, usage): (usize, &Usage)| {
        let what = match number {
            0 => "Most is held by",
            _ => "then by",
        };
        let blocks = match usage.blocks {
            1 => "1 block".to_owned(),
            count => format!("{count} blocks"),
        };
        let share = percent(usage.bytes, evidence.live_bytes());
        let said = |place| format!("{what} {place}: {} ({share}%), {blocks}", bytes(usage.bytes));
        let whole = said(names.holder(sites, usage.site));
        // The line matters more than the module.
        match names.place(sites, usage.site) {
            Some(place) if whole.chars().count() > MOST_COLUMNS => said(place),
            _ => whole,
        }
    };
    // A remnant says nothing.
    let is_told = |usage: &&crate::sites::Usage| usage.bytes >= evidence.live_bytes() / 50;
    found.iter().filter(is_told).take(MOST_HOLDERS).enumerate().map(line).collect()
}

#[cfg(test)]
mod tests;
