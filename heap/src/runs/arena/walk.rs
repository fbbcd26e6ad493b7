//! Runs in the order of their addresses.

use super::Arenas;
use super::run::{NO_RUN, RegionId, Run, RunId, RunState};
use super::space::Space;

impl Arenas {
    /// The free runs, in no order.
    pub fn free_runs(&self) -> impl Iterator<Item = &Run> {
        let mut ids = Vec::new();
        for (_, index) in self.spaces.iter().flat_map(Space::filled) {
            index.collect(&self.runs, &mut ids);
        }
        ids.into_iter().map(|id| &self.runs[id as usize])
    }

    /// The rows of free runs, address and bytes, in no order: neighbours of different streams are
    /// one.
    pub fn free_rows(&self) -> impl Iterator<Item = (u64, u64)> {
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
    pub fn runs_of(&self, region: RegionId) -> impl Iterator<Item = (RunId, &Run)> {
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
