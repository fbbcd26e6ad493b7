//! Arenas for reports: walks, counts, and the check of their invariants.

use crate::runs::arena::Arenas;
use crate::runs::arena::run::{NO_RUN, RegionId, Run, RunId, RunState, UNOWNED};
use crate::runs::arena::space::{Space, owner_at, owner_in};
use crate::small::size_class::PAGE;
use std::collections::HashMap;

/// The key of the index of unmapped ranges.
const UNMAPPED: u32 = u32::MAX - 1;

impl Arenas {
    /// Checks every region, run and index.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let mut listed = HashMap::new();
        for (number, space) in self.spaces.iter().enumerate() {
            let owned = space.owners.iter().enumerate();
            let owned = owned.map(|(at, index)| (owner_in(at), index.as_deref()));
            for (owner, index) in owned.chain([(UNMAPPED, Some(&space.unmapped))]) {
                let Some(index) = index else { continue };
                let mut ids = Vec::new();
                index.collect(&self.runs, &mut ids);
                let bytes: u64 = ids.iter().map(|&id| self.runs[id as usize].bytes).sum();
                if owner != UNMAPPED
                    && space.filled.contains(owner_at(owner) as u32) == ids.is_empty()
                {
                    return Err(format!(
                        "space {number}: whether stream {owner} has free runs is miscounted"
                    ));
                }
                if ids.len() != index.count as usize || bytes != index.bytes {
                    return Err(format!(
                        "space {number}: the index of stream {owner} miscounts its runs"
                    ));
                }
                for id in ids {
                    if listed.insert(id, (number, owner)).is_some() {
                        return Err(format!("run {id} is listed twice"));
                    }
                    let run = &self.runs[id as usize];
                    if run.epoch < index.oldest && owner != UNOWNED && owner != UNMAPPED {
                        return Err(format!("run {id} is older than its index says"));
                    }
                }
            }
        }
        let mut tiled = 0;
        for (id, region) in self.regions() {
            if !self.spaces[region.space as usize].regions.contains(&id) {
                return Err(format!("region {id} is not in its space"));
            }
            let (mut run_id, mut previous, mut address) = (region.first, NO_RUN, region.address);
            while run_id != NO_RUN {
                let run = &self.runs[run_id as usize];
                tiled += 1;
                if run.address != address
                    || run.region != id
                    || run.previous != previous
                    || run.bytes == 0
                {
                    return Err(format!(
                        "region {id}: run {run_id} at {:#x} is out of place",
                        run.address
                    ));
                }
                let expected = match run.state {
                    RunState::Free => Some((region.space as usize, run.stream)),
                    RunState::Unmapped => Some((region.space as usize, UNMAPPED)),
                    _ => None,
                };
                if run.state == RunState::Unmapped
                    && !(region.stitched
                        && run.address.is_multiple_of(PAGE)
                        && run.bytes.is_multiple_of(PAGE))
                {
                    return Err(format!(
                        "unmapped range {run_id} at {:#x} is not whole pages",
                        run.address
                    ));
                }
                if (run.state == RunState::StaleAlias)
                    != (self.stale_aliases.get(&run.address) == Some(&run_id))
                {
                    return Err(format!(
                        "run {run_id} ({:?}) is a stale alias and is not",
                        run.state
                    ));
                }
                if listed.get(&run_id).copied() != expected {
                    return Err(format!(
                        "run {run_id} ({:?}) is not listed where it belongs",
                        run.state
                    ));
                }
                if previous != NO_RUN {
                    let before = &self.runs[previous as usize];
                    let free = matches!(run.state, RunState::Free | RunState::Unmapped);
                    if free && before.state == run.state && before.stream == run.stream {
                        return Err(format!(
                            "free runs {previous} and {run_id} of one owner are not merged"
                        ));
                    }
                }
                if run.state == RunState::Unused {
                    return Err(format!("region {id} holds the unused run {run_id}"));
                }
                address += run.bytes;
                (previous, run_id) = (run_id, run.next);
            }
            if address != region.address + region.bytes {
                return Err(format!("region {id}: its runs end at {address:#x}"));
            }
        }
        for (number, space) in self.spaces.iter().enumerate() {
            let stale_aliases = self.stale_aliases.values().map(|&id| &self.runs[id as usize]);
            let here = stale_aliases
                .filter(|run| self.regions[run.region as usize].space as usize == number);
            if here.map(|run| run.bytes).sum::<u64>() != space.stale_alias_bytes {
                return Err(format!("space {number} miscounts its stale aliases"));
            }
        }
        let used = self.runs.iter().filter(|run| run.state != RunState::Unused).count();
        if used != tiled || self.runs.len() - used != self.unused_runs.len() {
            return Err(format!("{used} runs are in use, {tiled} are in regions"));
        }
        Ok(())
    }
}

impl Arenas {
    /// The free runs, in no order.
    pub(crate) fn free_runs(&self) -> impl Iterator<Item = &Run> {
        let mut ids = Vec::new();
        for (_, index) in self.spaces.iter().flat_map(Space::filled) {
            index.collect(&self.runs, &mut ids);
        }
        ids.into_iter().map(|id| &self.runs[id as usize])
    }

    /// The rows of free runs, address and bytes, in no order: neighbours of different streams form
    /// one row.
    pub(crate) fn free_rows(&self) -> impl Iterator<Item = (u64, u64)> {
        let is_free = |id: RunId| id != NO_RUN && self.runs[id as usize].state == RunState::Free;
        self.free_runs().filter(move |run| !is_free(run.previous)).map(move |first| {
            let (mut bytes, mut next) = (first.bytes, first.next);
            while is_free(next) {
                let run = &self.runs[next as usize];
                (bytes, next) = (bytes + run.bytes, run.next);
            }
            (first.address, bytes)
        })
    }

    /// The runs that tile a region, by address.
    pub(crate) fn runs_of(&self, region: RegionId) -> impl Iterator<Item = (RunId, &Run)> {
        let mut next = self.region(region).first;
        std::iter::from_fn(move || {
            let id = next;
            (id != NO_RUN).then(|| {
                let run = &self.runs[id as usize];
                next = run.next;
                (id, run)
            })
        })
    }
}

impl Arenas {
    /// Grows whenever memory becomes free, or free for more streams.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The most runs that there have been at a time.
    pub(crate) fn most_runs(&self) -> usize {
        self.runs.len()
    }

    /// Bytes of blocks and slabs, those that wait for streams included.
    pub(crate) fn busy(&self) -> u64 {
        self.busy
    }

    /// The highest [`Arenas::busy`] since the last call, for samples of the timeline.
    pub(crate) fn sample_busy_peak(&mut self) -> u64 {
        let peak = std::mem::replace(&mut self.busy_peak, self.busy);
        self.sampled_peak = self.sampled_peak.max(peak);
        peak
    }

    /// The highest [`Arenas::busy`] since the last call, whatever samples were taken meanwhile.
    pub(crate) fn take_busy_peak(&mut self) -> u64 {
        let peak = self.sample_busy_peak();
        peak.max(std::mem::take(&mut self.sampled_peak))
    }
}
