//! What a phase gives back.
#![deny(unsafe_code)]

use crate::driver::Driver;
use crate::heap::arena::Region;
use crate::heap::backing::Kind;
use crate::heap::central::Central;
use crate::heap::phase::Drain;
use crate::heap::streams::Streams;
use crate::record::Record;

impl Central {
    /// Gives idle memory back until `drain.keep` bytes are held or `drain.most` are given; the bytes given. Idle is what is everybody's,
    /// or a stream's that is past it (`completed`).
    pub(in crate::heap) fn give_idle(
        &mut self,
        driver: &dyn Driver,
        record: &Record,
        streams: &Streams,
        completed: &dyn Fn(u32) -> u64,
        drain: Drain,
    ) -> u64 {
        let held = self.backing.held;
        let most = held.saturating_sub(drain.keep).min(drain.most);
        match self.backing.kind {
            Kind::Stitch => self.give_pages(driver, streams, completed, most),
            _ => self.give_spans(driver, record, completed, most),
        }
        self.publish_reserved();
        held.saturating_sub(self.backing.held)
    }

    fn give_pages(
        &mut self,
        driver: &dyn Driver,
        streams: &Streams,
        completed: &dyn Fn(u32) -> u64,
        most: u64,
    ) {
        let spaces: Vec<_> = self.spaces.iter().collect();
        let spare = self.backing.pages.spare();
        self.loosen(driver, streams, &spaces, completed, most.saturating_sub(spare));
        self.backing.pages.release(driver, most);
        self.backing.refresh_pages();
    }

    fn give_spans(
        &mut self,
        driver: &dyn Driver,
        record: &Record,
        completed: &dyn Fn(u32) -> u64,
        most: u64,
    ) {
        let mut given = 0;
        for space in self.spaces.iter() {
            for id in self.arenas.empty_regions(space, completed) {
                let Region { bytes, span: (_, taken), .. } = *self.arenas.region(id);
                let is_given = given + bytes <= most && !self.backing.waits_to_give(taken);
                if is_given && self.shrink(driver, record, id) {
                    given += bytes;
                }
            }
        }
        if given > 0 {
            self.backing.trim(driver);
        }
    }
}
