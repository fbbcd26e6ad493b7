//! The books of a shard, held against each other.

use super::{Shard, SlabSums};
use crate::pool::lifetime::LIFETIMES;
use crate::small::bins::{Bins, NO_SLAB};
use crate::small::size_class::{CLASSES, class_of};
use crate::small::slab::{Slab, SlotState};
use std::collections::HashMap;

impl Shard {
    /// Walks every slab and bin.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub fn validate(&self) -> Result<(), String> {
        let mut listed = 0;
        for (group, bins) in self.bins.iter().enumerate() {
            for (at, bin) in bins.iter().flat_map(|bins| bins.all.iter().enumerate()) {
                let (mut id, mut previous, mut empties) = (bin.first, NO_SLAB, 0);
                while id != NO_SLAB {
                    let slab = self.slabs.get(id as usize).and_then(Option::as_deref);
                    let Some(slab) = slab else {
                        return Err(format!("a bin lists slab {id}, which is not there"));
                    };
                    let home = Bins::at(slab.lifetime, slab.class);
                    if home != at
                        || (slab.stream >> self.shift) as usize != group
                        || slab.previous != previous
                        || slab.is_full()
                    {
                        return Err(format!("slab {:#x} is on the wrong list", slab.base));
                    }
                    empties += u32::from(slab.used() == 0);
                    listed += 1;
                    (previous, id) = (id, slab.next);
                }
                if empties != bin.empties {
                    return Err(format!(
                        "a bin has {empties} empty slabs and counts {}",
                        bin.empties
                    ));
                }
            }
        }
        let mut borrowed = HashMap::new();
        for (_, slab) in self.slabs() {
            slab.validate()?;
            for slot in 0..slab.size_class().slots {
                let SlotState::Live { .. } = slab.state(slot) else { continue };
                let own = class_of(slab.facts(slot).requested) as u8;
                if own != slab.facts(slot).class {
                    return Err(format!(
                        "slab {:#x} has a block of class {own} under another",
                        slab.base
                    ));
                }
                if own != slab.class {
                    *borrowed
                        .entry((slab.stream >> self.shift, Bins::at(slab.lifetime, own)))
                        .or_insert(0) += 1;
                }
            }
        }
        for (group, bins) in self.bins.iter().enumerate() {
            for (lifetime, class) in
                (0..LIFETIMES as u8).flat_map(|l| (0..CLASSES as u8).map(move |c| (l, c)))
            {
                let Some(bins) = bins else { continue };
                let lends = bins.lends(lifetime, class);
                let listed = bins.all[Bins::at(lifetime, class)].first != NO_SLAB;
                if lends != (listed && self.borrows) {
                    return Err(format!("class {class} has a slab: {listed}; lends: {lends}"));
                }
            }
            for (at, bin) in bins.iter().flat_map(|bins| bins.all.iter().enumerate()) {
                let counted = borrowed.get(&(group as u32, at)).copied().unwrap_or(0);
                if counted != bin.borrowed {
                    return Err(format!(
                        "a bin has borrowed {counted} slots and counts {}",
                        bin.borrowed
                    ));
                }
            }
        }
        let sums_of = |slab: &Slab| {
            let (bytes, slots) = (slab.size_class().slab_bytes(), slab.size_class().slots);
            let used = u64::from(slab.used() > 0);
            SlabSums { bytes, used_bytes: used * bytes, used_slots: used * u64::from(slots) }
        };
        let sums = self.slabs().map(|(_, slab)| sums_of(slab)).sum();
        if self.sums != sums {
            return Err(format!("the slabs come to {sums:?}, and {:?} is counted", self.sums));
        }
        if listed != self.slabs().filter(|(_, slab)| !slab.is_full()).count() {
            return Err(format!("{listed} slabs are listed, but others have free slots too"));
        }
        Ok(())
    }
}
