//! Results of a notebook's cells that live on in its variables and in `Out`.
//!
//! The interpreter sees each cell as a file of its own name, so blocks of many finished cells are
//! evidence of repetition without step marks. In Jupyter, a cell run again has the same name, and
//! counts once.

use std::collections::{BTreeMap, BTreeSet};

use super::evidence::{Evidence, is_persistent};
use super::words::of;
use super::{Cause, Finding};
use crate::sites::{Frame, Phase, Site, SiteId};

/// Results below this share of live memory (one part in so many) are no cause.
const LEAST_SHARE: u64 = 4;
/// From this number on, cells pile up: weights, data and states are made in a few.
const MANY: usize = 12;

/// The remedy for results that a notebook keeps.
const KEPT: &[&str] = &[
    "To do: end a cell's last line with a semicolon, or give its result a name that is used again; \
     `%reset -f out` empties Out, `del NAME` a variable.",
];

/// The cell that made a site's blocks.
pub fn cell(site: &Site) -> Option<&Frame> {
    site.frames.iter().rev().find(|frame| frame.is_cell())
}

/// Results of many cells, if they are much of live memory.
pub fn find(evidence: &Evidence<'_>) -> Option<Finding> {
    let (mut cells, mut whole) = (BTreeSet::new(), 0u64);
    let mut lines: BTreeMap<&Frame, (u64, SiteId)> = BTreeMap::new();
    for block in evidence.live.iter().filter(|block| !is_persistent(block)) {
        let Some(site) = evidence.sites.get(block.site) else { continue };
        if let Some(cell) = cell(site)
            && !matches!(site.phase, Phase::Optimizer | Phase::Backward)
        {
            cells.insert(&cell.file);
            whole = whole.saturating_add(block.size);
            let line = site.line().filter(|line| line.is_own()).unwrap_or(cell);
            let (bytes, one) = lines.entry(line).or_default();
            (*bytes, *one) = (bytes.saturating_add(block.size), block.site);
        }
    }
    if cells.len() < MANY || whole < evidence.live_bytes() / LEAST_SHARE {
        return None;
    }
    let (line, (_, names)) = lines.into_iter().max_by_key(|&(_, (bytes, _))| bytes)?;
    Some(Finding {
        cause: Cause::Collected,
        bytes: whole,
        says: format!(
            "Results of {} cells of a notebook live on, the most of {}: {}",
            cells.len(),
            evidence.names.frame(line),
            of(whole, evidence.live_bytes())
        ),
        advice: KEPT,
        names,
        ..Finding::default()
    })
}
