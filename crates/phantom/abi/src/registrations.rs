//! Memory that a program has registered with NCCL: until it is deregistered it must stay where it
//! is, made of the same bytes of the device. NCCL hands those to peers and to network cards, which
//! go on writing there whatever is mapped at the addresses later.

use crate::gpu::gpu;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A registered range, and the device's bytes behind it: the number of the first, and how many.
struct Registration {
    address: u64,
    bytes: u64,
    behind: Vec<(u64, u64)>,
}

impl Registration {
    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.bytes
    }

    fn is_stale(&self) -> bool {
        self.behind != behind(self.address, self.bytes)
    }
}

struct Registrations {
    /// By handle.
    live: BTreeMap<usize, Registration>,
    /// All there were.
    count: usize,
    /// What was found stale, by address.
    stale: BTreeMap<u64, String>,
}

static REGISTRATIONS: Mutex<Registrations> =
    Mutex::new(Registrations { live: BTreeMap::new(), count: 0, stale: BTreeMap::new() });

/// The device's bytes behind a range up to its first hole, as few runs as there are.
fn behind(address: u64, bytes: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for piece in gpu().sim.backing(address, bytes) {
        match runs.last_mut() {
            Some((first, length)) if *first + *length == piece.physical => *length += piece.bytes,
            _ => runs.push((piece.physical, piece.bytes)),
        }
    }
    runs
}

fn with<T>(act: impl FnOnce(&mut Registrations) -> T) -> T {
    act(&mut REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Registers a range; returns its handle. `None`: the range is not all backed.
pub fn add(address: u64, bytes: u64) -> Option<usize> {
    let behind = behind(address, bytes);
    if behind.iter().map(|&(_, length)| length).sum::<u64>() != bytes {
        return None;
    }
    Some(with(|all| {
        all.count += 1;
        let handle = all.count;
        all.live.insert(handle, Registration { address, bytes, behind });
        handle
    }))
}

/// Ends a registration; false: there is none of this handle.
pub fn remove(handle: usize) -> bool {
    with(|all| {
        let Some(was) = all.live.remove(&handle) else { return false };
        note(&was, &mut all.stale);
        true
    })
}

/// A collective uses the memory at `address`.
pub fn used(address: u64) {
    with(|all| {
        for registration in all.live.values().filter(|one| one.contains(address)) {
            note(registration, &mut all.stale);
        }
    });
}

fn note(one: &Registration, stale: &mut BTreeMap<u64, String>) {
    if one.is_stale() {
        let Registration { address, bytes, .. } = *one;
        stale.entry(address).or_insert_with(|| {
            format!("{bytes} bytes at {address:#x} are registered with NCCL, and have moved")
        });
    }
}

/// The number of registrations so far, and those that were found stale.
pub fn all() -> (usize, Vec<String>) {
    with(|all| {
        for registration in all.live.values() {
            note(registration, &mut all.stale);
        }
        (all.count, all.stale.values().cloned().collect())
    })
}
