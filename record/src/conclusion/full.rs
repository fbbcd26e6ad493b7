//! A device that is full of live blocks of which none is to be accused: what they are, and what
//! helps in that state.

use super::evidence::{Evidence, Refused, is_persistent};
use super::words::{bytes, percent};
use super::{Cause, Finding};
use crate::sites::Phase;

/// Steps that must have been made before they are compared.
const LEAST_STEPS: u32 = 3;
/// A step needs more than others from this many per cent of their median on.
const MORE: u64 = 125;

/// What is live, by what it is for.
struct Parts {
    weights: u64,
    gradients: u64,
    states: u64,
    activations: u64,
}

impl Parts {
    fn of(evidence: &Evidence<'_>) -> Self {
        let mut parts = Parts { weights: 0, gradients: 0, states: 0, activations: 0 };
        for block in &evidence.live {
            let phase = evidence.sites.get(block.site).map_or(Phase::Unknown, |site| site.phase);
            let part = match phase {
                Phase::Optimizer => &mut parts.states,
                _ if is_persistent(block) => &mut parts.weights,
                Phase::Backward => &mut parts.gradients,
                Phase::Forward => &mut parts.activations,
                _ => continue,
            };
            *part = part.saturating_add(block.size);
        }
        parts
    }

    /// The named parts, the largest first.
    fn named(&self) -> Vec<(&'static str, u64)> {
        let mut named = vec![
            ("weights", self.weights),
            ("the backward", self.gradients),
            ("states of the optimiser", self.states),
            ("the forward", self.activations),
        ];
        named.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        named
    }
}

/// The device is full, and `refused` was one request too many.
pub fn find(evidence: &Evidence<'_>, refused: &Refused) -> Finding {
    let live = evidence.live_bytes();
    let parts = Parts::of(evidence);
    let (room, asked) = (bytes(evidence.room()), bytes(refused.asked));
    let usual = usual(evidence);
    let needed = live.saturating_add(refused.asked);
    let is_more = usual.filter(|&usual| needed >= usual / 100 * MORE);
    let says = match (is_more, evidence.now >= LEAST_STEPS) {
        (Some(usual), _) => format!(
            "Step {} needs more than the device has, and more than other steps, of which half peak \
             below {}: {} live of {room}, {asked} asked for",
            evidence.now,
            bytes(usual),
            bytes(live)
        ),
        (None, true) => format!(
            "The device is full of live blocks, and nothing grows: {} live of {room}, {asked} \
             asked for",
            bytes(live)
        ),
        (None, false) => format!(
            "The device is full of live blocks: {} live of {room}, {asked} asked for",
            bytes(live)
        ),
    };
    let advice = advice(evidence, &parts, is_more.is_some());
    Finding { cause: Cause::Full, bytes: live, says, advice }
}

/// What the live blocks are for, on one line.
pub fn parts(evidence: &Evidence<'_>) -> Option<String> {
    let live = evidence.live_bytes();
    let is_large = |&(_, part): &(&str, u64)| part >= live / 50 && part > 0;
    let named: Vec<String> = Parts::of(evidence)
        .named()
        .into_iter()
        .filter(is_large)
        .map(|(name, part)| format!("{name} {} ({}%)", bytes(part), percent(part, live)))
        .collect();
    (!named.is_empty()).then(|| format!("Of it: {}", named.join(", ")))
}

/// What the steps that are over had live at their peaks, half of them at most.
fn usual(evidence: &Evidence<'_>) -> Option<u64> {
    let now = u64::from(evidence.now);
    let steps = evidence.device.peaks_by_step().into_iter();
    // The first one makes what the others find.
    let mut peaks: Vec<u64> =
        steps.filter(|&(step, _)| step > 0 && step < now).map(|(_, peak)| peak).collect();
    peaks.sort_unstable();
    (evidence.now >= LEAST_STEPS).then(|| peaks.get(peaks.len() / 2).copied()).flatten()
}

/// What helps depends on what it is that fills the device.
fn advice(evidence: &Evidence<'_>, parts: &Parts, is_more: bool) -> &'static [&'static str] {
    let live = evidence.live_bytes();
    let training = &evidence.state.training;
    let trains = training.has_optimizer || evidence.now > 0 || !training.backward_lines.is_empty();
    if is_more {
        return &[
            "To do: bound the largest batch (cap or bucket the lengths, a budget of tokens), or \
             make this step in smaller parts.",
        ];
    }
    if parts.states > parts.activations && parts.states > live / 4 {
        return &[
            "To do: the states of the optimiser are the most: one with fewer or smaller states \
             (8 bits), or shard or offload them (FSDP, ZeRO).",
        ];
    }
    if parts.weights > live / 2 {
        return &[
            "To do: the weights are the most: fewer bits (bfloat16, 8 or 4 bits), or shard them \
             over GPUs (FSDP, tensor parallelism), or offload them.",
        ];
    }
    if evidence.sites.iter().any(|(_, site)| site.phase == Phase::Forward) && !trains {
        return &["To do: a smaller batch, shorter inputs, or weights of fewer bits."];
    }
    if !trains {
        return &["To do: look whether all blocks of these lines are needed at once."];
    }
    &["To do: a smaller batch (gradients can be accumulated over several), activation \
         checkpointing or offloading."]
}
