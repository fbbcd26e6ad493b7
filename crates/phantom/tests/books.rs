//! Random calls on pools, mappings and plain memory, against a model too simple to be wrong.

use std::collections::{BTreeMap, HashMap};

use gruyere_phantom::{
    Config, Costs, GRANULARITY as PAGE, Gpu, POOL_CHUNK, PoolAttribute, StreamKind,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 512 * MIB;

#[derive(Clone, Debug)]
enum PoolOp {
    Alloc { pool: usize, bytes: u64, stream: usize },
    Free { which: usize, stream: usize },
    Launch { stream: usize, ns: u64 },
    Synchronize { stream: usize },
    Trim { pool: usize, keep: u64 },
    Spend { ns: u64 },
}

fn pool_op() -> impl Strategy<Value = PoolOp> {
    let bytes =
        prop_oneof![1u64..4096, 1u64..4 * MIB, (1u64..20).prop_map(|n| n * PAGE), Just(70 * MIB)];
    prop_oneof![
        6 => (0usize..2, bytes, 0usize..3).prop_map(
            |(pool, bytes, stream)| PoolOp::Alloc { pool, bytes, stream }
        ),
        5 => (any::<usize>(), 0usize..3).prop_map(|(which, stream)| PoolOp::Free { which, stream }),
        1 => (0usize..3, 1u64..1000).prop_map(|(stream, ns)| PoolOp::Launch { stream, ns }),
        1 => (0usize..3).prop_map(|stream| PoolOp::Synchronize { stream }),
        1 => (0usize..2, 0u64..100 * MIB).prop_map(|(pool, keep)| PoolOp::Trim { pool, keep }),
        1 => (0u64..500).prop_map(|ns| PoolOp::Spend { ns }),
    ]
}

#[derive(Clone, Debug)]
enum MapOp {
    Reserve { pages: u64 },
    FreeRange { which: usize },
    Create { pages: u64 },
    Release { which: usize },
    Map { range: usize, at: u64, handle: usize },
    Unmap { range: usize, at: u64, pages: u64 },
    Alloc { bytes: u64 },
    Free { which: usize },
}

fn map_op() -> impl Strategy<Value = MapOp> {
    prop_oneof![
        2 => (1u64..12).prop_map(|pages| MapOp::Reserve { pages }),
        1 => any::<usize>().prop_map(|which| MapOp::FreeRange { which }),
        3 => (1u64..4).prop_map(|pages| MapOp::Create { pages }),
        2 => any::<usize>().prop_map(|which| MapOp::Release { which }),
        5 => (any::<usize>(), 0u64..12, any::<usize>()).prop_map(
            |(range, at, handle)| MapOp::Map { range, at, handle }
        ),
        4 => (any::<usize>(), 0u64..12, 1u64..6).prop_map(
            |(range, at, pages)| MapOp::Unmap { range, at, pages }
        ),
        1 => (1u64..9 * MIB).prop_map(|bytes| MapOp::Alloc { bytes }),
        1 => any::<usize>().prop_map(|which| MapOp::Free { which }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Pools never hand out overlapping memory, count to the byte, keep their bounds, and come back
    /// to nothing.
    #[test]
    fn pools_keep_their_books(
        ops in prop::collection::vec(pool_op(), 1..120), bound in prop::option::of(2u64..6)
    ) {
        let gpu = Gpu::new(Config { costs: Costs::zero(), oracle: false, ..Config::new(CAPACITY) });
        let max_size = bound.map_or(0, |chunks| chunks * POOL_CHUNK);
        let pools = [0, 1].map(|_| gpu.pool_create(0, max_size).unwrap());
        let streams = [0; 3].map(|_| gpu.stream_create(0, StreamKind::NonBlocking).unwrap());
        // Address -> (bytes, pool).
        let mut live: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
        for op in ops {
            match op {
                PoolOp::Alloc { pool, bytes, stream } => {
                    if let Ok(address) = gpu.pool_alloc(0, pools[pool], bytes, streams[stream]) {
                        let bytes = bytes.next_multiple_of(512);
                        prop_assert_eq!(address % 512, 0);
                        let before = live.range(..address + bytes).next_back();
                        prop_assert!(
                            before.is_none_or(|(&at, &(length, _))| at + length <= address)
                        );
                        prop_assert!(gpu.is_backed(address, bytes));
                        live.insert(address, (bytes, pool));
                    }
                }
                PoolOp::Free { which, stream } => {
                    if let Some(&address) = live.keys().nth(which % live.len().max(1)) {
                        gpu.pool_free(0, address, streams[stream]).unwrap();
                        let (bytes, _) = live.remove(&address).unwrap();
                        prop_assert!(!gpu.is_backed(address, bytes));
                    }
                }
                PoolOp::Launch { stream, ns } => gpu.launch(0, streams[stream], 1, ns).unwrap(),
                PoolOp::Synchronize { stream } => gpu.stream_synchronize(
                    0, streams[stream]
                ).unwrap(),
                PoolOp::Trim { pool, keep } => {
                    let before = gpu.pool_books(pools[pool]).unwrap().reserved;
                    gpu.pool_trim(0, pools[pool], keep).unwrap();
                    prop_assert!(gpu.pool_books(pools[pool]).unwrap().reserved >= keep.min(before));
                }
                PoolOp::Spend { ns } => gpu.host_spend(ns),
            }
            let mut reserved = 0;
            for (index, &pool) in pools.iter().enumerate() {
                let books = gpu.pool_books(pool).unwrap();
                let used: u64 =
                    live.values().filter(|&&(_, p)| p == index).map(|&(bytes, _)| bytes).sum();
                prop_assert_eq!(books.used, used);
                prop_assert!(books.reserved >= used && books.reserved.is_multiple_of(POOL_CHUNK));
                prop_assert!(max_size == 0 || books.reserved <= max_size);
                prop_assert!(books.ready + used <= books.reserved);
                reserved += books.reserved;
            }
            prop_assert_eq!(gpu.books(0).physical, reserved);
            prop_assert!(reserved <= CAPACITY);
        }
        for &address in live.keys() {
            gpu.pool_free(0, address, streams[0]).unwrap();
        }
        gpu.device_synchronize(0).unwrap();
        for pool in pools {
            gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, 0).unwrap();
            gpu.pool_trim(0, pool, 0).unwrap();
            gpu.pool_destroy(0, pool).unwrap();
        }
        prop_assert_eq!(gpu.books(0).physical, 0);
        prop_assert_eq!(gpu.address_books().reserved, 0);
        prop_assert_eq!(gpu.misuses(), vec![]);
    }

    /// Mappings follow a page table kept page by page; calls against it fail, others succeed.
    #[test]
    fn mappings_keep_their_books(ops in prop::collection::vec(map_op(), 1..150)) {
        let capacity = 24 * PAGE;
        let gpu = Gpu::new(Config { costs: Costs::zero(), oracle: false, ..Config::new(capacity) });
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut handles: Vec<u64> = Vec::new();
        let mut pages_of: HashMap<u64, u64> = HashMap::new();
        // Page address -> (handle, index of the page in its mapping).
        let mut table: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let mut plain: Vec<(u64, u64)> = Vec::new();
        for op in ops {
            let held: u64 = pages_of
                .iter()
                .filter(
                    |(handle, _)| handles.contains(handle)
                        || table.values().any(|(h, _)| h == *handle)
                )
                .map(|(_, pages)| pages * PAGE)
                .sum::<u64>()
                + plain.iter().map(|&(_, bytes)| bytes).sum::<u64>();
            prop_assert_eq!(gpu.books(0).physical, held);
            match op {
                MapOp::Reserve { pages } => {
                    let base = gpu.address_reserve(0, pages * PAGE, 0).unwrap();
                    prop_assert!(
                        ranges
                            .iter()
                            .all(|&(at, n)| base >= at + n * PAGE || base + pages * PAGE <= at)
                    );
                    ranges.push((base, pages));
                }
                MapOp::FreeRange { which } if !ranges.is_empty() => {
                    let index = which % ranges.len();
                    let (base, pages) = ranges[index];
                    let empty = table.range(base..base + pages * PAGE).next().is_none();
                    prop_assert_eq!(gpu.address_free(0, base, pages * PAGE).is_ok(), empty);
                    if empty {
                        ranges.swap_remove(index);
                    }
                }
                MapOp::Create { pages } => match gpu.physical_create(0, pages * PAGE) {
                    Ok(handle) => {
                        prop_assert!(held + pages * PAGE <= capacity);
                        handles.push(handle);
                        pages_of.insert(handle, pages);
                    }
                    Err(_) => prop_assert!(held + pages * PAGE > capacity),
                },
                MapOp::Release { which } if !handles.is_empty() => {
                    let handle = handles.swap_remove(which % handles.len());
                    gpu.physical_release(0, handle).unwrap();
                    prop_assert!(gpu.physical_release(0, handle).is_err());
                }
                MapOp::Map { range, at, handle } if !ranges.is_empty() && !handles.is_empty() => {
                    let (base, room) = ranges[range % ranges.len()];
                    let handle = handles[handle % handles.len()];
                    let (pages, at) = (pages_of[&handle], at % room);
                    let start = base + at * PAGE;
                    // A request may not extend into a neighbouring reservation.
                    let fits = at + pages <= room
                        && table.range(start..start + pages * PAGE).next().is_none();
                    prop_assert_eq!(gpu.map(0, start, pages * PAGE, 0, handle).is_ok(), fits);
                    if fits {
                        table.extend((0..pages).map(|i| (start + i * PAGE, (handle, i))));
                    }
                }
                MapOp::Unmap { range, at, pages } if !ranges.is_empty() => {
                    let (base, room) = ranges[range % ranges.len()];
                    let at = at % room;
                    let start = base + at * PAGE;
                    let whole: Vec<_> =
                        (0..pages).map(|i| table.get(&(start + i * PAGE)).copied()).collect();
                    let begins = whole[0].is_some_and(|(_, index)| index == 0);
                    let ends =
                        whole[whole.len() - 1].is_some_and(|(h, index)| index + 1 == pages_of[&h]);
                    // A call stays inside one reservation, whatever the next has mapped.
                    let fine =
                        begins && ends && whole.iter().all(Option::is_some) && at + pages <= room;
                    prop_assert_eq!(gpu.unmap(0, start, pages * PAGE).is_ok(), fine);
                    if fine {
                        table.retain(|&page, _| page < start || page >= start + pages * PAGE);
                    }
                }
                MapOp::Alloc { bytes } => {
                    if let Ok(address) = gpu.alloc(0, bytes) {
                        plain.push((address, bytes.next_multiple_of(PAGE)));
                    }
                }
                MapOp::Free { which } if !plain.is_empty() => {
                    let (address, _) = plain.swap_remove(which % plain.len());
                    gpu.free(0, address).unwrap();
                }
                _ => {}
            }
            for (&page, &(handle, index)) in &table {
                let backing = gpu.backing(page, PAGE);
                prop_assert_eq!(backing.len(), 1);
                prop_assert_eq!(backing[0].source, gruyere_phantom::Source::Mapping(handle));
                prop_assert_eq!(backing[0].offset, index * PAGE);
            }
        }
    }
}
