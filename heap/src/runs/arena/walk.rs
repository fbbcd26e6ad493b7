//! Runs in the order of their addresses.

use super::Arenas;
use super::run::{NO_RUN, RegionId, Run, RunId};
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
