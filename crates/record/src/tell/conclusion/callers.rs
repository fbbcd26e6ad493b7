//! Callers of a module's `forward`: the line that the program's author looks for when a layer's
//! line made a block.

use std::collections::HashMap;

use super::words::Names;
use crate::BlockEntry;
use crate::sites::{Frame, Site, SiteId, Sites};

/// The share of a line's memory (one part in so many) that may come from other callers.
const ELSEWHERE: u64 = 10;

/// The innermost of the program's own frames common to all these stacks and outside a module's
/// `forward`: the line that calls the model, if there is one.
pub fn caller<'a>(sites: &[&'a Site]) -> Option<&'a Frame> {
    let shared = common(sites);
    let is_forward = |frame: &&Frame| frame.function.ends_with("forward");
    shared.iter().rev().copied().find(|frame| !is_forward(frame)).or(shared.last().copied())
}

/// Whether a site may make inputs of the forwards with these sites, which `frame` called: it lies
/// outside of modules, in the same call of the function, as far as stacks show (the function's
/// callers are the same).
pub fn is_input(site: &Site, frame: &Frame, forwards: &[&Site]) -> bool {
    if !site.module.is_empty() {
        return false;
    }
    let (own, shared) = (own(site), common(forwards));
    let Some(at) = shared.iter().rposition(|common| *common == frame) else { return false };
    own.get(..at) == shared.get(..at)
        && own.get(at).is_some_and(|other| other.is_of_function_of(frame))
}

/// The program's own frames, outermost first.
pub fn own(site: &Site) -> Vec<&Frame> {
    site.frames.iter().rev().filter(|frame| frame.is_own()).collect()
}

/// The program's own frames common to all these stacks, outermost first.
fn common<'a>(sites: &[&'a Site]) -> Vec<&'a Frame> {
    let Some((first, others)) = sites.split_first() else { return Vec::new() };
    let mut shared = own(first);
    for site in others {
        let alike = shared.iter().zip(own(site)).take_while(|(one, other)| **one == *other);
        let alike = alike.count();
        shared.truncate(alike);
    }
    shared
}

/// For each line of a module's `forward`, its caller.
pub struct Callers<'a>(HashMap<&'a Frame, &'a Frame>);

impl<'a> Callers<'a> {
    /// The callers of nearly all of each line's memory.
    pub fn of(live: &[BlockEntry], sites: &'a Sites) -> Self {
        let mut by_site: HashMap<SiteId, u64> = HashMap::new();
        for block in live {
            let bytes = by_site.entry(block.site).or_default();
            *bytes = bytes.saturating_add(block.size);
        }
        let mut by_line: HashMap<&Frame, HashMap<Option<&Frame>, u64>> = HashMap::new();
        for (id, bytes) in by_site {
            let (Some(line), Some(site)) = (sites.line(id), sites.get(id)) else { continue };
            let site = sites.get(site.forward).unwrap_or(site);
            let found = caller(&[site]).filter(|frame| *frame != line);
            let sum = by_line.entry(line).or_default().entry(found).or_default();
            *sum = sum.saturating_add(bytes);
        }
        let most = |(line, found): (&'a Frame, HashMap<Option<&'a Frame>, u64>)| {
            let whole = found.values().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
            let (most, bytes) = found.into_iter().max_by_key(|&(frame, bytes)| (bytes, frame))?;
            (bytes >= whole - whole / ELSEWHERE).then_some((line, most?))
        };
        Self(by_line.into_iter().filter_map(most).collect())
    }

    /// The caller of a site's line.
    pub fn of_site(&self, sites: &Sites, id: SiteId) -> Option<&'a Frame> {
        self.0.get(sites.line(id)?).copied()
    }

    /// Origin of a site's blocks: its line and its caller.
    pub fn made(&self, names: &Names, sites: &Sites, id: SiteId) -> Option<String> {
        let place = names.place(sites, id)?;
        let called = self.of_site(sites, id);
        Some(called.map_or_else(
            || place.clone(),
            |frame| format!("{place}, called from {}", names.frame(frame)),
        ))
    }
}
