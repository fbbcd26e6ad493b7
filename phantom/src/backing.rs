//! What stands behind each address: the books of address -> physical memory.

use std::collections::BTreeMap;

/// What kind of memory an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// An allocation from the pool of this handle.
    Pool(usize),
    /// A mapping of this physical handle.
    Mapping(u64),
    /// A plain allocation.
    Plain,
    /// Allocated by a captured stream, and `freed` by one.
    Graph {
        /// The capture, and its graph.
        capture: u64,
        /// The graph frees it itself: it goes when the graph goes.
        freed: bool,
    },
}

/// One contiguous backed range.
///
/// Physical memory is numbered: every byte that was ever created has a number of its own,
/// `physical`, which is never given out again. Two addresses with the same number are aliases of
/// one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// First address.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The number of its first physical byte.
    pub physical: u64,
    /// The offset of its first byte in its physical handle, pool chunk or plain allocation.
    pub offset: u64,
    /// The device whose memory it is.
    pub device: u32,
    /// What it belongs to.
    pub source: Source,
    /// The devices that may read and write it, a bit each.
    pub access: u64,
}

/// All backed ranges, by address. They never overlap.
#[derive(Debug, Default)]
pub(crate) struct Backings {
    by_address: BTreeMap<u64, Backing>,
}

impl Backings {
    pub(crate) fn insert(&mut self, backing: Backing) {
        self.by_address.insert(backing.address, backing);
    }

    pub(crate) fn remove(&mut self, address: u64) -> Option<Backing> {
        self.by_address.remove(&address)
    }

    pub(crate) fn get(&self, address: u64) -> Option<&Backing> {
        self.by_address.get(&address)
    }

    /// The backed range that holds `address`.
    pub(crate) fn holding(&self, address: u64) -> Option<&Backing> {
        let (_, backing) = self.by_address.range(..=address).next_back()?;
        (address - backing.address < backing.bytes).then_some(backing)
    }

    /// The backed ranges that touch the range, in order.
    pub(crate) fn touching(&self, address: u64, bytes: u64) -> impl Iterator<Item = &Backing> + '_ {
        let from = self.holding(address).map_or(address, |b| b.address);
        self.by_address.range(from..address.saturating_add(bytes)).map(|(_, backing)| backing)
    }

    /// Lets `grant` into the mapping that begins at `address`.
    pub(crate) fn grant(&mut self, address: u64, grant: u64) {
        if let Some(backing) = self.by_address.get_mut(&address) {
            backing.access |= grant;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Backing> + '_ {
        self.by_address.values()
    }

    /// Lets `grant` into all that a source has handed out.
    pub(crate) fn grant_all(&mut self, source: Source, grant: u64) {
        for backing in self.by_address.values_mut().filter(|backing| backing.source == source) {
            backing.access |= grant;
        }
    }

    /// The part of the range from its start on that is backed without a hole, cut into pieces; less
    /// than `bytes` in all where a hole begins.
    pub(crate) fn pieces(&self, address: u64, bytes: u64) -> impl Iterator<Item = Backing> + '_ {
        let end = address.saturating_add(bytes);
        let mut expected = address;
        self.touching(address, bytes).map_while(move |b| {
            let start = b.address.max(address);
            if start != expected || start >= end {
                return None;
            }
            let stop = (b.address + b.bytes).min(end);
            expected = stop;
            let skip = start - b.address;
            Some(Backing {
                address: start,
                bytes: stop - start,
                physical: b.physical + skip,
                offset: b.offset + skip,
                ..*b
            })
        })
    }
}
