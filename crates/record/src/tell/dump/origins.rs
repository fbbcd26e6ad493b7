//! Renumbers sites for a file, keeping those in use.
#![deny(unsafe_code)]

use std::collections::{BTreeSet, HashMap};

use super::state::Training;
use crate::sites::{Phase, Site, SiteId, Sites, fill_from_slabs};
use crate::{BlockEntry, BlockState, Reader};

/// What a record says of blocks: their sites, and which were sent.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    known: Sites,
    /// By device and address.
    blocks: HashMap<(u8, u64), SiteId>,
    /// Live blocks that were sent to other processes, by device and address.
    sent: BTreeSet<(u8, u64)>,
    /// Numbers given so far.
    numbers: HashMap<SiteId, SiteId>,
    told: Vec<Site>,
}

impl Origins {
    /// Reads the sites of a record's blocks now.
    pub fn read(reader: &Reader<'_>) -> Self {
        let mut origins = Self::of_sites(reader.sites());
        let entries = reader.blocks().entries;
        let sent =
            entries.iter().filter(|(block, state)| block.is_sent && *state == BlockState::Live);
        origins.sent = sent.map(|(block, _)| (block.device, block.address)).collect();
        if origins.known.is_empty() {
            return origins;
        }
        let mut blocks: Vec<BlockEntry> = entries.into_iter().map(|(block, _)| block).collect();
        fill_from_slabs(&mut blocks, &reader.segments().entries);
        let is_told = |block: &&BlockEntry| block.site != SiteId::NONE;
        let place = |block: &BlockEntry| ((block.device, block.address), block.site);
        let blocks = blocks.iter().filter(is_told).map(place).collect();
        Self { blocks, ..origins }
    }

    /// For a caller that knows the sites of its blocks.
    pub fn of_sites(known: Sites) -> Self {
        Self { known, ..Self::default() }
    }

    /// The site of the block at `address`, by its number in the file.
    pub fn of(&mut self, device: u32, address: u64) -> SiteId {
        let place = u8::try_from(device).ok().map(|device| (device, address));
        let site = place.and_then(|place| self.blocks.get(&place)).copied();
        self.number(site.unwrap_or_default())
    }

    /// Addresses of a device's live blocks that were sent to other processes.
    pub fn sent(&self, device: u32) -> BTreeSet<u64> {
        let of_device = self.sent.iter().filter(|block| u32::from(block.0) == device);
        of_device.map(|block| block.1).collect()
    }

    /// The number in the file of a site of the record.
    pub fn number(&mut self, id: SiteId) -> SiteId {
        if let Some(&number) = self.numbers.get(&id) {
            return number;
        }
        let Some(site) = self.known.get(id).cloned() else {
            return if id == SiteId::NONE { id } else { SiteId::OTHER };
        };
        // One link is enough: a forward has none.
        let forward = match self.numbers.get(&site.forward) {
            Some(&number) => number,
            None => self.known.get(site.forward).cloned().map_or(SiteId::NONE, |forward| {
                self.add(site.forward, Site { forward: SiteId::NONE, ..forward })
            }),
        };
        self.add(id, Site { forward, ..site })
    }

    fn add(&mut self, id: SiteId, site: Site) -> SiteId {
        self.told.push(site);
        let number = SiteId(self.told.len() as u32);
        self.numbers.insert(id, number);
        number
    }

    /// What all sites of the record show about the training.
    pub fn training(&self) -> Training {
        let mut lines = BTreeSet::new();
        let mut has_optimizer = false;
        for (_, site) in self.known.iter() {
            has_optimizer |= site.phase == Phase::Optimizer;
            if let Some(forward) = self.known.get(site.forward) {
                lines.extend(forward.frames.iter().filter(|frame| frame.is_own()));
            }
        }
        Training { has_optimizer, backward_lines: lines.into_iter().cloned().collect() }
    }

    /// The numbered sites.
    pub fn into_sites(self) -> Sites {
        Sites::new(self.told)
    }
}
