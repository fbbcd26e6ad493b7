//! States of an optimiser that exist twice.

use std::collections::{BTreeMap, BTreeSet};

use super::evidence::{Evidence, is_persistent};
use super::words::of;
use super::{Cause, Finding};
use crate::BlockEntry;
use crate::sites::{Frame, Phase};

/// The least share of live memory worth a sentence (one part in so many).
const LEAST_SHARE: u64 = 20;

/// Steps in the sentence, at most.
const MOST_STEPS: usize = 4;

/// The time of the states' making: the step, and the calling line of the program.
type When<'a> = (u32, Option<&'a Frame>);

/// Whether a line of an optimiser makes one state per weight. LBFGS keeps a history; averages of
/// weights are no states.
fn makes_one_state(frame: &Frame) -> bool {
    let (_, name) = frame.file.rsplit_once("/torch/optim/").unwrap_or_default();
    !name.is_empty() && !["lbfgs.py", "swa_utils.py"].contains(&name)
}

/// An optimiser of torch's makes one state per weight, of its size, in one line of its own. So if
/// one line made blocks at several times, those beyond the number of weights of their size are in
/// excess. Of other optimisers nothing is known: they may keep many states of a weight (a
/// history, two in one line), or states of another type.
pub fn twice(evidence: &Evidence<'_>) -> Option<Finding> {
    let mut weights: BTreeMap<u64, u64> = BTreeMap::new();
    // By the innermost frame: the sizes by time.
    let mut lines: BTreeMap<&Frame, BTreeMap<When<'_>, BTreeMap<u64, u64>>> = BTreeMap::new();
    for block in &evidence.live {
        let &BlockEntry { site, step, size, .. } = block;
        let site = evidence.sites.get(site);
        let optimizers = site.filter(|site| site.phase == Phase::Optimizer);
        if let Some(site) = optimizers
            && let Some(frame) = site.frames.first().filter(|frame| makes_one_state(frame))
        {
            let caller = site.line().filter(|line| line.is_own());
            let made = lines.entry(frame).or_default().entry((step, caller)).or_default();
            *made.entry(size).or_default() += 1;
        } else if is_persistent(block) {
            *weights.entry(size).or_default() += 1;
        }
    }
    let (mut excess, mut steps, mut line) = (0u64, BTreeSet::new(), None);
    for made in lines.values().filter(|made| made.len() > 1) {
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        for (size, count) in made.values().flatten() {
            *sizes.entry(*size).or_default() += count;
        }
        let mut of_line = 0u64;
        for (size, all) in sizes {
            let once = weights.get(&size).copied().unwrap_or(all);
            of_line = of_line.saturating_add(size.saturating_mul(all.saturating_sub(once)));
        }
        if of_line > 0 {
            excess = excess.saturating_add(of_line);
            steps.extend(made.keys().map(|&(step, _)| step));
            line = line.or(made.keys().next_back().and_then(|&(_, line)| line));
        }
    }
    if excess == 0 || excess < evidence.live_bytes() / LEAST_SHARE {
        return None;
    }
    let times = match steps.len() {
        0..=2 => "twice".to_owned(),
        times => format!("{times} times"),
    };
    let mut steps: Vec<String> = steps.iter().map(u32::to_string).collect();
    if steps.len() > MOST_STEPS {
        steps.truncate(MOST_STEPS - 1);
        steps.push("later ones".to_owned());
    }
    let place = line.map_or(String::new(), |line| format!(" ({})", evidence.names.frame(line)));
    let copies = of(excess, evidence.live_bytes());
    let steps = match &steps[..] {
        [one] => format!("step {one}"),
        [all @ .., last] => format!("steps {} and {last}", all.join(", ")),
        [] => String::new(),
    };
    Some(Finding {
        cause: Cause::OptimizerTwice,
        bytes: excess,
        says: format!(
            "The states of an optimiser are there {times}, made in {steps}{place}: {copies}"
        ),
        advice: &[
            "To do: let go of the first optimiser (and of its scheduler, which keeps it) before \
             the second is made.",
        ],
        is_of_past_steps: true,
        ..Finding::default()
    })
}
