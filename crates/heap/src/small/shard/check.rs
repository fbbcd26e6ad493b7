//! The check of a shard's books against each other.

use crate::small::shard::{Bins, NO_SLAB, Shard, SlabSums};
use crate::small::size_class::class_of;
use crate::small::slab::Slab;

impl Shard {
    /// Checks every slab and bin.
    ///
    /// # Errors
    /// The first broken invariant, in words.
    pub(crate) fn validate(&self) -> Result<(), String> {
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
        for (_, slab) in self.slabs() {
            slab.validate()?;
            let is_other = |&slot: &u32| class_of(slab.facts(slot).requested) as u8 != slab.class;
            if slab.live_slots().any(|slot| is_other(&slot)) {
                return Err(format!("slab {:#x} has a block of another class", slab.base));
            }
        }
        let sums_of = |slab: &Slab| {
            let (bytes, slots) = (slab.bytes(), slab.count());
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
