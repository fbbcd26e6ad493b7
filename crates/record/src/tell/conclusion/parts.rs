//! Live memory by purpose.

use std::collections::{HashMap, HashSet};

use super::callers::caller;
use super::evidence::{Evidence, is_persistent};
use super::full::{LEAST_STEPS, SEVERAL};
use super::pile;
use super::words::{bytes, percent};
use crate::BlockEntry;
use crate::sites::{Frame, Phase, Site, SiteId};

/// Parts of less than one part in so many of a step's live memory are left out.
const LEAST_PART: u64 = 50;
/// Lines shown of the model's callers: the caller, and the caller of its function.
const CALLERS: usize = 2;
/// Share of live memory (one part in so many) from which on an untrained line is named.
const UNTRAINED_SHARE: u64 = 4;
const ACTIVATIONS: &str = "activations of the forward";
/// Ends of the files of the functions that load tensors from files.
const LOADERS: [&str; 2] = ["torch/serialization.py", "safetensors/torch.py"];

/// The folder of torch's optimisers.
const OPTIMIZERS: &str = "/torch/optim/";

/// Whether a site is within a function that loads tensors from a file.
fn is_loaded(site: &Site) -> bool {
    let is_loader = |frame: &Frame| LOADERS.iter().any(|loader| frame.file.ends_with(loader));
    site.frames.iter().any(is_loader)
}

/// Whether a site is within DistributedDataParallel itself, and no module that it calls.
fn is_of_buckets(site: &Site) -> bool {
    site.frames
        .first()
        .is_some_and(|frame| frame.file.ends_with("torch/nn/parallel/distributed.py"))
}

/// Whether a function of torch's optimiser steps all weights at once (`foreach`).
fn is_foreach(frame: &Frame) -> bool {
    frame.file.contains(OPTIMIZERS) && frame.function.contains("_multi_tensor_")
}

/// The sites of temporaries of an optimiser's step. What makes its states in `_init_group`, as Adam
/// does, makes none in the function that steps; others do (SGD its momenta).
fn temporaries(evidence: &Evidence<'_>) -> HashSet<SiteId> {
    let frames = evidence.sites.iter().flat_map(|(_, site)| &site.frames);
    let makes_states =
        |frame: &&Frame| frame.file.contains(OPTIMIZERS) && frame.function.ends_with("_init_group");
    let files: HashSet<&str> = frames.filter(makes_states).map(|frame| &*frame.file).collect();
    let is_one = |frame: &Frame| is_foreach(frame) && files.contains(&*frame.file);
    let sites = evidence.sites.iter().filter(|(_, site)| site.frames.iter().any(is_one));
    sites.map(|(id, _)| id).collect()
}

/// Whether a request was refused in such a function.
pub fn is_refused_to_foreach(evidence: &Evidence<'_>) -> bool {
    let refused = evidence.refused.as_ref().and_then(|refused| evidence.sites.get(refused.site));
    refused.is_some_and(|site| site.frames.iter().any(is_foreach))
}

/// Live memory by purpose.
#[derive(Default)]
pub struct Parts<'a> {
    pub weights: u64,
    /// Of the weights, those that the running step has made.
    pub new_weights: u64,
    pub gradients: u64,
    pub states: u64,
    /// Temporaries of the optimiser's step, of all weights at once (`foreach`).
    pub temporaries: u64,
    pub activations: u64,
    pub without_gradients: u64,
    outside: u64,
    /// Copies of the gradients that DistributedDataParallel reduces.
    buckets: u64,
    /// Loaded from files, neither weights nor states: checkpoints that are still there, datasets.
    pub loaded: u64,
    /// The activations by the lines that called the model, innermost first.
    called: HashMap<Vec<&'a Frame>, u64>,
}

impl<'a> Parts<'a> {
    pub fn of(evidence: &Evidence<'a>) -> Self {
        let live = || {
            let site = |block: &BlockEntry| evidence.sites.get(block.site);
            evidence.live.iter().filter_map(move |block| Some((block, site(block)?)))
        };
        let loaded = evidence.sites.iter().filter(|(_, site)| is_loaded(site));
        let loaded: HashSet<SiteId> = loaded.map(|(id, _)| id).collect();
        let is_loaded = |block: &BlockEntry| loaded.contains(&block.site);
        // A model copies the weights of a checkpoint; an optimiser keeps its states where they lie.
        let weights = live().filter(|(block, _)| is_persistent(block) && !is_loaded(block));
        let weights: HashSet<u64> = weights.map(|(block, _)| block.size).collect();
        let trains = evidence.trains();
        let is_state = |block: &BlockEntry| {
            trains && is_loaded(block) && is_persistent(block) && weights.contains(&block.size)
        };
        let temporaries = temporaries(evidence);
        let mut parts = Parts::default();
        for (block, site) in live() {
            let part = match site.phase {
                Phase::Optimizer if temporaries.contains(&block.site) => &mut parts.temporaries,
                Phase::Optimizer => &mut parts.states,
                _ if is_state(block) => &mut parts.states,
                _ if is_persistent(block) => {
                    if block.step == evidence.now {
                        parts.new_weights = parts.new_weights.saturating_add(block.size);
                    }
                    &mut parts.weights
                }
                _ if is_loaded(block) => &mut parts.loaded,
                Phase::Backward => &mut parts.gradients,
                _ if is_of_buckets(site) => &mut parts.buckets,
                Phase::Forward if site.no_grad => &mut parts.without_gradients,
                Phase::Forward => {
                    let own = site.frames.iter().filter(|frame| frame.is_own());
                    let called = caller(&[site]);
                    let called = own.skip_while(|frame| Some(*frame) != called).take(CALLERS);
                    let bytes = parts.called.entry(called.collect()).or_default();
                    *bytes = bytes.saturating_add(block.size);
                    &mut parts.activations
                }
                Phase::Unknown => &mut parts.outside,
                _ => continue,
            };
            *part = part.saturating_add(block.size);
        }
        if parts.weights == 0 {
            // Not of modules that the package knows: functions of a dictionary, TorchScript.
            parts.weights = std::mem::take(&mut parts.loaded);
        }
        parts
    }

    /// The named parts, largest first.
    fn named(&self) -> Vec<(&'static str, u64)> {
        let mut named = vec![
            (ACTIVATIONS, self.activations),
            ("weights", self.weights),
            ("made in the backward", self.gradients),
            ("states of the optimiser", self.states),
            ("temporaries of the optimiser's step", self.temporaries),
            (
                "buckets of DistributedDataParallel (gradient_as_bucket_view=True saves them)",
                self.buckets,
            ),
            ("loaded from files, neither weights nor states", self.loaded),
            ("made in forwards without gradients", self.without_gradients),
            ("made outside of modules", self.outside),
        ];
        named.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        named
    }

    /// The call of the model that made nearly all activations.
    fn from(&self, evidence: &Evidence<'_>) -> Option<String> {
        let (lines, &most) = self.called.iter().max_by_key(|&(lines, bytes)| (bytes, lines))?;
        let is_most = most >= self.activations - self.activations / 10;
        let lines: Vec<String> = lines.iter().map(|line| evidence.names.frame(line)).collect();
        (is_most && !lines.is_empty()).then(|| format!(", called from {}", lines.join(", ")))
    }

    /// Whether a backward has run through the line that called the model for most activations.
    pub fn are_trained(&self, evidence: &Evidence<'_>) -> bool {
        let lines = &evidence.state.training.backward_lines;
        self.caller_of_most().is_some_and(|line| lines.contains(line))
    }

    /// Whether none has, while others were trained: its forwards are under way.
    pub fn are_untrained(&self, evidence: &Evidence<'_>) -> bool {
        self.caller_of_most().is_some_and(|line| evidence.is_untrained(line))
    }

    /// The line that called the model for most activations.
    fn caller_of_most(&self) -> Option<&'a Frame> {
        let most = self.called.iter().max_by_key(|&(called, bytes)| (bytes, called));
        most.and_then(|(called, _)| called.first()).copied()
    }

    /// The line whose forwards are over and keep much of the activations, though no backward has
    /// run through it, while others were trained: an evaluation, or the beginning of a training.
    pub fn untrained(&self, evidence: &Evidence<'_>) -> Option<(&'a Frame, u64)> {
        // In the first steps lines may be missing whose backward is still to come.
        if evidence.state.training.backward_lines.is_empty() || evidence.now < LEAST_STEPS {
            return None;
        }
        // Of several, all but the last are over.
        let is_several = pile::forwards_at_once(evidence) >= SEVERAL;
        let mut by_line: HashMap<&Frame, u64> = HashMap::new();
        for (lines, bytes) in &self.called {
            let is_over = |line: &Frame| is_several || !pile::is_under_way(evidence, line);
            let is_it = |line: &&&Frame| evidence.is_untrained(line) && is_over(line);
            if let Some(line) = lines.first().filter(is_it) {
                *by_line.entry(line).or_default() += bytes;
            }
        }
        let most = by_line.into_iter().max_by_key(|&(line, bytes)| (bytes, line));
        most.filter(|&(_, bytes)| bytes >= evidence.live_bytes() / UNTRAINED_SHARE)
    }

    /// One sentence with each part's share of live memory. `None`: they are less than half of it.
    pub fn told(&self, evidence: &Evidence<'_>) -> Option<String> {
        let live = evidence.live_bytes();
        let told = |(name, part): (&str, u64)| {
            let from = self.from(evidence).filter(|_| name == ACTIVATIONS).unwrap_or_default();
            format!("{}% {name} ({}){from}", percent(part, live), bytes(part))
        };
        let named = self.named();
        let known = named.iter().map(|&(_, part)| part).sum::<u64>() - self.outside;
        if known < live / 2 {
            return None;
        }
        let named = named.into_iter().filter(|&(_, part)| part > 0 && part >= live / LEAST_PART);
        let named: Vec<String> = named.map(told).collect();
        (!named.is_empty()).then(|| format!("Of what is live: {}", named.join("; ")))
    }
}
