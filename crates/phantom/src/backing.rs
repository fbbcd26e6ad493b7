//! The books of what backs each address with physical memory.

use std::collections::BTreeMap;

/// The kind of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// An allocation from the pool of this handle.
    Pool(usize),
    /// A mapping of this physical handle.
    Mapping(u64),
    /// A plain allocation.
    Plain,
    /// An allocation by a captured stream, and `freed` by one.
    Graph {
        /// The capture and its graph.
        capture: u64,
        /// The graph frees the memory itself, so it goes with the graph.
        freed: bool,
    },
}

/// One contiguous backed range.
///
/// Every physical byte ever created has its own number, `physical`, which is never reused. Two
/// addresses with the same number are aliases of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// First address.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The number of its first physical byte.
    pub physical: u64,
    /// The offset of its first byte in its physical handle or plain allocation; in a pool, the
    /// number of that byte.
    pub offset: u64,
    /// The device that owns the memory.
    pub device: u32,
    /// The kind of memory.
    pub source: Source,
    /// Mask of the devices that may read and write it.
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

    /// Grants access to the mapping that begins at `address`.
    pub(crate) fn grant(&mut self, address: u64, grant: u64) {
        if let Some(backing) = self.by_address.get_mut(&address) {
            backing.access |= grant;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Backing> + '_ {
        self.by_address.values()
    }

    /// Grants access to all memory of a source.
    pub(crate) fn grant_all(&mut self, source: Source, grant: u64) {
        for backing in self.by_address.values_mut().filter(|backing| backing.source == source) {
            backing.access |= grant;
        }
    }

    /// The pieces of the range from its start to its first hole; fewer than `bytes` in all if there
    /// is a hole.
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
