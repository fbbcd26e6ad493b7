//! A device full of live blocks without a culprit: their purposes, and remedies for that state.

use super::device::is_before_forwards;
use super::evidence::{Evidence, Refused, is_persistent};
use super::parts::{self, Parts};
use super::pile;
use super::words::bytes;
use super::{Cause, Finding};
use super::{again, attempts};
use crate::BlockEntry;
use crate::sites::{By, Phase, SiteId, Usage, usage};

/// Steps needed before they are compared.
pub const LEAST_STEPS: u32 = 3;
/// A step needs more than others from this percentage of their median on; steps vary if the highest
/// reaches it.
const MORE: u64 = 125;
/// Share of live memory (one part in so many) from which on what was loaded from files, or is left
/// of a failed attempt, is the first to go, if the request would then have fitted.
const LEAST_SHARE: u64 = 20;
/// From this number on, several forwards may wait for one backward.
pub const SEVERAL: usize = 3;
/// From this number of blocks on, a line fills a buffer.
const BUFFERED: u64 = 4;

/// The device is full, and `refused` was one request too many.
pub fn find(evidence: &Evidence<'_>, refused: &Refused) -> Finding {
    let (live, since) = evidence.live_at_refusal(refused);
    let parts = Parts::of(evidence);
    let needed = live.saturating_add(refused.asked);
    let before = Before::of(evidence);
    let larger = before.as_ref().filter(|before| needed >= before.typical / 100 * MORE);
    let (now, asked) = (evidence.now, bytes(refused.asked));
    let by = evidence.names.place(evidence.sites, refused.site);
    let by = by.map_or(String::new(), |place| format!(" by {place}"));
    let room = match evidence.room() < evidence.device.total_bytes {
        true => format!("the ceiling of {}", bytes(evidence.room())),
        false => bytes(evidence.room()),
    };
    // No sum: memory held and not live is missing in it, and it would look like the device's size.
    let needs = format!("{}{since} of {room} live, {asked} more asked for{by}", bytes(live));
    let mut says = match larger {
        Some(before) => format!(
            "Step {now} of the run is larger than {} before: {needs}; typical peak {}",
            if before.highest < needed { "those" } else { "most" },
            bytes(before.typical)
        ),
        None if now >= LEAST_STEPS => {
            format!("The device is full of live blocks, and nothing grows: {needs}")
        }
        None => format!("The device is full of live blocks: {needs}"),
    };
    if let Some(told) = parts.told(evidence) {
        says.push_str(&format!(". {told}"));
    }
    let untrained = parts.untrained(evidence);
    if let Some((line, part)) = untrained {
        let (line, part) = (evidence.names.frame(line), bytes(part));
        says.push_str(&format!(". No backward has run through {line}, which keeps {part}"));
    }
    let again = again::made_again(evidence, refused);
    if let Some(again) = again {
        let again = bytes(again);
        says.push_str(&format!(
            ". {again} repeats weights that are live: a second copy of the model?"
        ));
    }
    let buffer = buffer(evidence, refused).filter(|_| again.is_none());
    let line = buffer.as_ref().and_then(|Buffer { usage, .. }| {
        Some((usage, evidence.names.place(evidence.sites, usage.site)?))
    });
    if let Some((usage, place)) = &line {
        let Usage { blocks, bytes: part, .. } = usage;
        says.push_str(&format!(". {place} has {} in {blocks} blocks", bytes(*part)));
    }
    let names = line.map_or(SiteId::NONE, |(usage, _)| usage.site);
    let would_fit = |bytes: u64| bytes >= refused.asked.max(live / LEAST_SHARE);
    let left = attempts::left(evidence);
    let advice = match (would_fit(left), would_fit(parts.loaded)) {
        _ if again.is_some() => again::ADVICE,
        (true, _) => {
            says.push_str(&format!(
                ". {} is left of an attempt that ran out of memory before",
                bytes(left)
            ));
            attempts::ADVICE
        }
        (_, true) => LOADED,
        _ => advice(evidence, &parts, larger, (buffer.as_ref(), untrained.is_some())),
    };
    Finding { cause: Cause::Full, bytes: live, says, advice, names, ..Finding::default() }
}

/// Whether the step in which a request was refused needs more than those before by more than
/// `bytes`, which earlier steps have left, `bytes_a_step` each: then the step matters more.
pub fn is_larger_by(
    evidence: &Evidence<'_>,
    refused: &Refused,
    bytes: u64,
    bytes_a_step: u64,
) -> bool {
    let (live, _) = evidence.live_at_refusal(refused);
    let needed = live.saturating_add(refused.asked);
    let Some(Before { surely: (step, peak), .. }) = Before::of(evidence) else { return false };
    let since = u64::from(evidence.now).saturating_sub(step);
    let expected = peak.saturating_add(bytes_a_step.saturating_mul(since));
    needed.saturating_sub(expected) > bytes
}

/// Live memory at the peaks of past steps.
struct Before {
    /// The median. The first step makes what the others find, and is left out.
    typical: u64,
    highest: u64,
    /// The highest without the last look, which may have reached into the running step; and the
    /// step of that.
    surely: (u64, u64),
    /// The highest of each third of the steps, in order.
    thirds: Vec<u64>,
}

impl Before {
    /// `None`: too few steps.
    fn of(evidence: &Evidence<'_>) -> Option<Self> {
        let now = u64::from(evidence.now);
        let peaks = evidence.device.peaks_by_step();
        let highest = peaks.range(..now).map(|(_, &peak)| peak).max()?;
        let looks = peaks.range(..now).rev().skip(1).map(|(&step, &peak)| (step, peak));
        let surely = looks.max_by_key(|&(_, peak)| peak)?;
        let mut peaks: Vec<u64> = peaks.range(1..now.max(1)).map(|(_, &peak)| peak).collect();
        let third = |number| &peaks[number * peaks.len() / 3..(number + 1) * peaks.len() / 3];
        let thirds = (0..3).filter_map(|number| third(number).iter().max().copied()).collect();
        peaks.sort_unstable();
        let typical = *peaks.get(peaks.len() / 2)?;
        (evidence.now >= LEAST_STEPS).then_some(Self { typical, highest, surely, thirds })
    }

    /// Whether each third of the steps needed clearly more than the one before.
    fn rise(&self) -> bool {
        let is_more = |pair: &[u64]| pair[1] >= pair[0] + pair[0] / 20;
        self.thirds.len() == 3 && self.thirds.windows(2).all(is_more)
    }

    /// Whether the steps differ, as steps of random lengths do.
    fn vary(&self) -> bool {
        self.highest >= self.typical / 100 * MORE
    }
}

const RECOMPUTED: &[&str] =
    &["To do: a smaller batch (gradients can be accumulated over several), or less of the lines \
     above that no checkpoint recomputes (a loss over a large vocabulary can be computed in \
     chunks)."];
const CARRIED: &[&str] =
    &["To do: if a state is carried from one backward to the next, detach() it there; else a \
     smaller batch (gradients can be accumulated over several), activation checkpointing \
     (torch.utils.checkpoint) or offloading."];
const UNTRAINED: &[&str] =
    &["To do: if the line without a backward only evaluates, run it in torch.no_grad() or \
     torch.inference_mode(), and keep .item() of its results; if it trains, give it less (batch, \
     length), or work on it in parts."];
const LOADED: &[&str] = &[
    "To do: load to the host (map_location=\"cpu\"), and drop a checkpoint once load_state_dict() \
     has copied it (del); of a dataset, move one batch at a time to the device.",
];
const BUFFER: &[&str] = &[
    "To do: keep fewer of that line's blocks at once, or smaller ones: bound its queue or buffer, \
     fetch fewer ahead, drop each before the next; leave a dataset on the host; of a cache of keys \
     and values, reserve a shorter length.",
];
const DATASET: &[&str] =
    &["To do: if that line's blocks are a dataset, leave it on the host, and move one batch at a \
     time to the device; else a smaller batch (gradients can be accumulated over several), \
     activation checkpointing (torch.utils.checkpoint) or offloading."];
const COPIED: &[&str] = &[
    "To do: weights were made, loaded or copied in this step, and no batch changes them: let go \
     of what is used no more, and keep copies on the host (.cpu() of each tensor of state_dict(), \
     and load_state_dict() where one is used); else fewer bits, or shard or offload them.",
];
const WITHOUT_GRADIENTS: &[&str] = &[
    "To do: what forwards without gradients made is the most. If it is their results, move them \
     to the host as they come (.cpu()), or keep .item() of each; else give these forwards a \
     smaller batch, or shorter inputs.",
];
const FEW_ACTIVATIONS: &[&str] =
    &["To do: a smaller batch (gradients can be accumulated over several), or less of the lines \
     above (a loss over a large vocabulary can be computed in chunks): activations of modules, \
     which checkpoints would save, are few."];

const FOREACH: &[&str] =
    &["To do: the optimiser's step has no room for its temporaries, of all weights at once: with \
     `foreach=False` it has them of one weight at a time, with `fused=True` (Adam, AdamW, SGD, \
     Adagrad) none. Else fewer or smaller states, or freeze or shard weights (FSDP, ZeRO)."];

const SAVED: &[&str] =
    &["To do: of copies (weights for a checkpoint, results to be saved), make each on the host \
     (.cpu()) before the next; else keep fewer of that line's blocks at once, since the steps \
     before fitted."];
const SUMMED: &[&str] =
    &["To do: if losses of several batches are summed for one backward, call backward() on each \
     (gradients add up); else a smaller batch, activation checkpointing (torch.utils.checkpoint) \
     or offloading."];

/// A line outside of modules with much of live memory in many blocks.
struct Buffer {
    usage: Usage,
    /// All of its blocks were made in the running step, which has room for no more of them.
    is_of_this_step: bool,
    /// No backward has run yet: it may be a part of the training, but for what a forward has made.
    may_be_trained: bool,
}

/// The line outside of modules, no part of the training, with most of live memory in many blocks,
/// or in a program that trains nothing with much of it: batches and weights fetched ahead, queues,
/// buffers, datasets. A quarter is much of what the running step alone has made at the line that
/// asks for more: the steps before fitted without.
fn buffer(evidence: &Evidence<'_>, refused: &Refused) -> Option<Buffer> {
    let Evidence { live, sites, now, .. } = evidence;
    let (trains, backward_lines) = (evidence.trains(), &evidence.state.training.backward_lines);
    // Before the first backward of a training, only an operation without gradients is known to be
    // none of it.
    let may_be_trained =
        |block: &BlockEntry| trains && sites.get(block.site).is_none_or(|site| !site.no_grad);
    let is_buffered = |block: &&BlockEntry| {
        let (Some(site), Some(line)) = (sites.get(block.site), sites.line(block.site)) else {
            return false;
        };
        let is_outside = site.phase == Phase::Unknown && site.module.is_empty();
        let is_trained = backward_lines.contains(line);
        is_outside && !is_trained && !is_persistent(block) && block.capture == 0
    };
    let buffered: Vec<BlockEntry> = live.iter().filter(is_buffered).copied().collect();
    let much = evidence.live_bytes() / if trains { 2 } else { 4 };
    let is_many = |line: &&Usage, much: u64| line.blocks >= BUFFERED && line.bytes > much;
    let is_now = |line: &&Usage| {
        let of_line = |block: &&BlockEntry| sites.are_of_one_line(line.site, block.site);
        *now >= LEAST_STEPS
            && sites.are_of_one_line(line.site, refused.site)
            && is_many(line, evidence.live_bytes() / 4)
            && buffered.iter().filter(of_line).all(|block| block.step == *now)
    };
    let lines = usage(&buffered, sites, By::Line, *now);
    let of_this_step = lines.iter().find(is_now);
    let usage = of_this_step.or_else(|| lines.first().filter(|line| is_many(line, much)))?.clone();
    let is_of_this_step = of_this_step.is_some();
    let blocks: Vec<&BlockEntry> =
        buffered.iter().filter(|block| sites.are_of_one_line(usage.site, block.site)).collect();
    let may_be_trained =
        backward_lines.is_empty() && blocks.iter().any(|block| may_be_trained(block));
    if may_be_trained && !is_before_forwards(evidence, &blocks) {
        return None;
    }
    Some(Buffer { usage, is_of_this_step, may_be_trained })
}

/// The remedy depends on what fills the device.
fn advice(
    evidence: &Evidence<'_>,
    parts: &Parts<'_>,
    larger: Option<&Before>,
    (buffer, has_untrained): (Option<&Buffer>, bool),
) -> &'static [&'static str] {
    let live = evidence.live_bytes();
    let trains = evidence.trains();
    if let Some(buffer) = buffer {
        return match buffer.may_be_trained {
            true => DATASET,
            false if trains && buffer.is_of_this_step => SAVED,
            false => BUFFER,
        };
    }
    if has_untrained {
        return UNTRAINED;
    }
    if parts::is_refused_to_foreach(evidence) {
        return FOREACH;
    }
    if parts.new_weights > live / 4 && evidence.now >= LEAST_STEPS {
        return COPIED;
    }
    let is_several = parts.activations > live / 2 && pile::forwards_at_once(evidence) >= SEVERAL;
    match larger {
        Some(_) if trains && is_several => {
            return &[
                "To do: if losses of several batches are summed for one backward, call backward() \
                 on each (gradients add up). Else make this step's batch smaller, or its inputs \
                 shorter.",
            ];
        }
        Some(before) if before.rise() => {
            return &[
                "To do: steps need more and more: bound what grows with them (points or tokens \
                 that are added, a history that is joined to), or work on it in parts.",
            ];
        }
        Some(before) if before.vary() => {
            return &[
                "To do: bound the largest step, since steps differ (cap or bucket the lengths, a \
                 budget of tokens a batch), or work on it in parts.",
            ];
        }
        Some(_) if trains && parts.without_gradients > live / 4 => {
            return &[
                "To do: if the forwards without gradients are an evaluation whose results are \
                 kept, move them to the host as they come (.cpu()), or keep .item() of each; else \
                 give it a smaller batch, or shorter inputs, than now: the steps before fitted.",
            ];
        }
        Some(_) if trains && parts.activations > live / 2 && parts.are_untrained(evidence) => {
            return &[
                "To do: no backward has run through the line of these forwards: if they only \
                 evaluate, run them in torch.no_grad() or torch.inference_mode(); else give this \
                 step less (batch, length, model), since those before fitted.",
            ];
        }
        Some(_) if trains && parts.activations > live / 2 => {
            return &[
                "To do: give this step less (batch, length, model), since those before fitted; or \
                 work on it in parts (gradients add up over several backwards), or recompute \
                 activations in the backward (torch.utils.checkpoint).",
            ];
        }
        Some(_) => {
            return &[
                "To do: give this step less (batch, length, model), since those before fitted; or \
                 work on it in parts.",
            ];
        }
        None => {}
    }
    if trains && parts.gradients > live / 2 && parts.gradients / 2 > parts.weights {
        return &[
            "To do: gradients are the most, of several backwards at once (tasks, samples, a list \
             of .grad): add them up as they come, or keep them on the host.",
        ];
    }
    if let Some(told) = of_the_model(parts, live, trains) {
        return told;
    }
    if !trains && parts.activations > live / 2 {
        return &["To do: gradients are on, so that the forward keeps all its activations: if no \
             backward follows, run it in torch.no_grad() or torch.inference_mode(); else a \
             smaller batch, or shorter inputs."];
    }
    if evidence.sites.iter().any(|(_, site)| site.phase == Phase::Forward) && !trains {
        return &[
            "To do: a smaller batch or fewer requests at a time, shorter inputs or outputs (fewer \
             beams, fewer new tokens), or weights of fewer bits.",
        ];
    }
    if !trains {
        return match evidence.sites.is_empty() {
            true => &["To do: free what is not needed at once, or work on less at a time."],
            false => &["To do: look whether all blocks of these lines are needed at once."],
        };
    }
    if parts.without_gradients > live / 2 {
        return WITHOUT_GRADIENTS;
    }
    match evidence.recomputes() {
        true => RECOMPUTED,
        // Functions without modules have theirs outside of these.
        false if parts.activations > 0 && parts.activations < live / 10 => FEW_ACTIVATIONS,
        // A layer that runs over time counts as several forwards, too.
        false if is_several && parts.are_trained(evidence) => CARRIED,
        false if is_several && evidence.state.training.backward_lines.is_empty() => SUMMED,
        false => {
            &["To do: a smaller batch (gradients can be accumulated over several), activation \
             checkpointing (torch.utils.checkpoint) or offloading."]
        }
    }
}

/// The remedy where the model is the most, whatever the batch.
fn of_the_model(parts: &Parts<'_>, live: u64, trains: bool) -> Option<&'static [&'static str]> {
    let &Parts { weights, gradients, states, .. } = parts;
    let is_most = weights + gradients + states > live / 3 * 2 && weights > live / 5;
    Some(match (trains, is_most) {
        // No step shows whether a server goes on loading.
        (false, _) if weights > live / 2 => {
            &["To do: the weights are the most. If more are loaded as requests come (adapters, \
             models), keep fewer and drop the least used; else fewer bits (bfloat16, 8 or 4 bits), \
             or shard them over GPUs (tensor parallelism), or offload them."]
        }
        (true, true) if states > live / 5 => {
            &["To do: weights, gradients and states of the optimiser are the most, whatever the \
             batch: an optimiser with fewer or smaller states (8 bits), freeze what is not to be \
             trained, or shard or offload all three (FSDP, ZeRO)."]
        }
        (true, true) if gradients > live / 8 => &[
            "To do: the weights and their gradients are the most, whatever the batch: freeze what \
             is not to be trained (requires_grad_(False)); else fewer bits (bfloat16), or shard \
             or offload them (FSDP).",
        ],
        (true, _) if weights > live / 2 => {
            &["To do: the weights are the most: fewer bits (bfloat16, 8 or 4 bits), or shard them \
             over GPUs (FSDP, tensor parallelism), or offload them."]
        }
        (true, _) if states > parts.activations && states > live / 4 => {
            &["To do: the states of the optimiser are the most: one with fewer or smaller states \
             (8 bits), or shard or offload them (FSDP, ZeRO)."]
        }
        _ => return None,
    })
}
