//! Where in the program blocks and slabs come from ([`crate::sites`]).

use crate::central::SMALL;
use crate::device::{Device, is_large};
use crate::request::Request;
use crate::runs::page_table::Owner;
use crate::shared::Shared;
use crate::sync::lock;
use gruyere_record::sites::SiteId;

impl Device {
    /// `request`, and where it comes from if a slab may be made for it: asked before the locks
    /// under which slabs are made.
    pub(crate) fn located(&self, shared: &Shared, request: Request) -> Request {
        if is_large(request.size) {
            return request;
        }
        Request { site: shared.site(request.size), ..request }
    }

    /// Tells the record where the block at `address`, in pages of `owner`, comes from. `None`: no
    /// block starts there.
    pub(crate) fn set_site(&self, address: u64, owner: Owner, site: SiteId) -> Option<()> {
        match owner {
            Owner::Slab { shard, slab, .. } => self.in_shard(shard, |shard, writer, _| {
                let slab = shard.slab(slab)?;
                writer.set_site(slab.facts(slab.slot_at(address)?).block, site);
                Some(())
            }),
            Owner::Large { blocks, .. } => {
                let central = &mut *lock(&self.central);
                let slot = central.find(address, blocks)?.1.slot;
                central.writers[SMALL].set_site(slot, site);
                Some(())
            }
            Owner::None => lock(&self.central).set_direct_site(address, site),
        }
    }
}
