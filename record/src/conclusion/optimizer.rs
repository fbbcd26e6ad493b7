//! States of an optimiser that are there twice.

use std::collections::BTreeMap;

use super::evidence::Evidence;
use super::words::of;
use super::{Cause, Finding};
use crate::BlockEntry;
use crate::sites::{Frame, Phase};

/// Of what is live, the least share that is worth a word.
const LEAST_SHARE: u64 = 20;

/// The same line of an optimiser made the same blocks more than once: in several steps, or called
/// from several lines. An optimiser makes its states once.
pub fn twice(evidence: &Evidence<'_>) -> Option<Finding> {
    // By the innermost frame: by step and calling line, the sizes.
    type Made<'a> = BTreeMap<(u32, Option<&'a Frame>), Vec<u64>>;
    let mut lines: BTreeMap<&Frame, Made<'_>> = BTreeMap::new();
    for &BlockEntry { site, step, size, .. } in &evidence.live {
        if let Some(site) = evidence.sites.get(site)
            && site.phase == Phase::Optimizer
            && let Some(frame) = site.frames.first()
        {
            let caller = site.line().filter(|line| line.is_own());
            lines.entry(frame).or_default().entry((step, caller)).or_default().push(size);
        }
    }
    let (mut excess, mut steps, mut line) = (0u64, Vec::new(), None);
    for made in lines.values_mut() {
        let mut by_sizes: BTreeMap<&[u64], Vec<(u32, Option<&Frame>)>> = BTreeMap::new();
        for (&when, sizes) in made.iter_mut() {
            sizes.sort_unstable();
            by_sizes.entry(sizes).or_default().push(when);
        }
        for (sizes, when) in by_sizes.into_iter().filter(|(_, when)| when.len() > 1) {
            let of_one: u64 = sizes.iter().sum();
            excess = excess.saturating_add(of_one * (when.len() as u64 - 1));
            steps.extend(when.iter().map(|&(step, _)| step));
            line = line.or(when.last().and_then(|&(_, line)| line));
        }
    }
    if excess == 0 || excess < evidence.live_bytes() / LEAST_SHARE {
        return None;
    }
    steps.sort_unstable();
    steps.dedup();
    let steps: Vec<String> = steps.iter().take(4).map(u32::to_string).collect();
    let place = line.map_or(String::new(), |line| format!(" ({})", evidence.names.frame(line)));
    let copies = of(excess, evidence.live_bytes());
    let steps = match &steps[..] {
        [one] => format!("step {one}"),
        steps => format!("steps {}", steps.join(" and ")),
    };
    Some(Finding {
        cause: Cause::OptimizerTwice,
        bytes: excess,
        says: format!(
            "The states of an optimiser are there twice, made in {steps}{place}: {copies}"
        ),
        advice: &[
            "To do: let go of the first optimiser (and of its scheduler, which keeps it) before \
             the second is made; to go on from a checkpoint, load_state_dict into the one there \
             is.",
        ],
    })
}
