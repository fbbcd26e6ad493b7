//! The heap queries the source of sites once for each large block and each slab, with no lock held,
//! and the result is on the record.

use crate::common::{BACKINGS, DEFAULT, MIB, Rig};
use gruyere::heap::Sites;
use gruyere::record::sites::{NewSite, SiteId};
use gruyere::record::{Reader, Record, SegmentKind};
use gruyere_phantom::{CaptureMode, as_program};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Returns a new site for each query: that of module `1`, `2` and so on.
#[derive(Default)]
struct Asked {
    times: AtomicU32,
    /// The rig that it uses during a query, as a garbage collector run would.
    rig: OnceLock<Weak<Rig>>,
    is_used: AtomicBool,
    /// Returns no site.
    is_dumb: bool,
}

impl Asked {
    fn times(&self) -> u32 {
        self.times.load(Ordering::Relaxed)
    }
}

struct Provider(Arc<Asked>);

impl Sites for Provider {
    fn current(&self, record: &Record, _: u64) -> SiteId {
        let number = self.0.times.fetch_add(1, Ordering::Relaxed) + 1;
        // Its own requests query it again.
        if let Some(rig) = self.0.rig.get().and_then(Weak::upgrade)
            && !self.0.is_used.swap(true, Ordering::Relaxed)
        {
            for size in [4 * MIB, 1000] {
                assert!(rig.heap.free(rig.malloc(size, DEFAULT)));
            }
            rig.heap.validate().unwrap();
            rig.heap.trim();
            self.0.is_used.store(false, Ordering::Relaxed);
        }
        if self.0.is_dumb {
            return SiteId::NONE;
        }
        record.site(&NewSite { module: &number.to_string(), ..NewSite::default() })
    }
}

fn asking(conf: &str, all: bool, asked: Asked) -> (Arc<Rig>, Arc<Asked>) {
    let mut rig = Rig::new(&format!("record:on,{conf}"));
    let asked = Arc::new(asked);
    rig.heap.ask_sites(Box::new(Provider(asked.clone())), all);
    (Arc::new(rig), asked)
}

/// The modules of the sites of blocks and of slabs, by address; without those that have no site.
fn told(rig: &Rig) -> [BTreeMap<u64, String>; 2] {
    let reader = Reader::own(rig.heap.record()).unwrap();
    let sites = reader.sites();
    let module = |id| sites.get(id).map_or(String::new(), |site| site.module.clone());
    let blocks = reader.blocks().entries;
    let blocks = blocks.iter().map(|(block, _)| (block.address, module(block.site))).collect();
    let segments = reader.segments().entries;
    let slabs = segments.iter().filter(|segment| segment.kind == SegmentKind::Slab);
    [blocks, slabs.map(|slab| (slab.address, module(slab.site))).collect()]
}

#[test]
fn each_large_block_is_asked_for_once_and_has_the_answer_and_a_small_one_has_none() {
    for backing in BACKINGS {
        let (rig, asked) = asking(backing, false, Asked::default());
        // The first grows the heap, the second is served from what is free.
        let [first, second, small] = [4 * MIB, MIB + 1, 1000].map(|size| rig.malloc(size, DEFAULT));
        let [blocks, slabs] = told(&rig);
        assert_eq!((&*blocks[&first], &*blocks[&second]), ("1", "2"), "{backing}");
        assert_eq!(blocks[&small], "", "{backing}");
        let slabs: Vec<_> = slabs.into_values().collect();
        let is_direct = backing == "backing:passthrough";
        assert_eq!(slabs, if is_direct { vec![] } else { vec!["3".to_owned()] }, "{backing}");
        assert_eq!(asked.times(), if is_direct { 2 } else { 3 }, "{backing}");
        // Nothing is left of the slot's former block.
        assert!(rig.heap.free(first));
        let again = rig.malloc(4 * MIB, DEFAULT);
        assert_eq!(told(&rig)[0][&again], asked.times().to_string(), "{backing}");
        rig.check();
    }
}

#[test]
fn the_hot_path_asks_too() {
    let (rig, asked) = asking("", false, Asked::default());
    assert!(rig.heap.free(rig.malloc(4 * MIB, DEFAULT)));
    assert!(rig.heap.is_plain());
    let address = rig.heap.serve::<true>(3 * MIB, 0, DEFAULT);
    assert_ne!(address, 0);
    assert_eq!((&*told(&rig)[0][&address], asked.times()), ("2", 2));
    // A request left to the slow path causes no query there.
    assert_eq!(rig.heap.serve::<true>(300 * MIB, 0, DEFAULT), 0);
    assert_eq!(asked.times(), 2);
}

#[test]
fn small_blocks_have_sites_too_where_all_is_asked_for() {
    for backing in BACKINGS {
        let (rig, _) = asking(backing, true, Asked::default());
        assert!(!rig.heap.is_plain(), "the hot path would leave them out");
        let addresses: Vec<u64> = [1000, 1000, 4 * MIB, 70_000]
            .into_iter()
            .map(|size| rig.malloc(size, DEFAULT))
            .collect();
        let [blocks, _] = told(&rig);
        let mut modules: Vec<_> = addresses.iter().map(|address| &*blocks[address]).collect();
        modules.dedup();
        assert_eq!(modules.len(), 4, "{backing}: each its own: {modules:?}");
        assert!(!modules.contains(&""), "{backing}");
        rig.check();
    }
}

#[test]
fn blocks_and_slabs_of_pools_and_captures_have_sites() {
    let (rig, _) = asking("headroom:0", false, Asked::default());
    let pool = rig.heap.pool_create("mine", 0, 0, None).unwrap();
    rig.heap.pool_enter(pool).unwrap();
    let large = rig.malloc(4 * MIB, DEFAULT);
    rig.malloc(1000, DEFAULT);
    rig.heap.pool_leave(pool).unwrap();
    let stream = rig.stream();
    rig.heap.begin_allocate_to_pool(0, (1, 7)).unwrap();
    as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, Some(7))).unwrap();
    let captured = rig.malloc(4 * MIB, stream);
    rig.malloc(1000, stream);
    let [blocks, slabs] = told(&rig);
    assert!(!blocks[&large].is_empty() && !blocks[&captured].is_empty(), "{blocks:?}");
    assert_eq!(slabs.len(), 2);
    assert!(slabs.values().all(|module| !module.is_empty()), "{slabs:?}");
}

#[test]
fn whoever_is_asked_may_use_the_heap_so_no_lock_of_it_is_held() {
    for (backing, all) in BACKINGS.iter().flat_map(|&backing| [(backing, false), (backing, true)]) {
        let (rig, asked) = asking(backing, all, Asked::default());
        asked.rig.set(Arc::downgrade(&rig)).unwrap();
        let sizes = [4 * MIB, 1000, 70_000, MIB + 1, 33 * MIB, 3000];
        let mut addresses: Vec<u64> = sizes.map(|size| rig.malloc(size, DEFAULT)).into();
        // The driver's own blocks are in no pool.
        if backing != "backing:passthrough" {
            let pool = rig.heap.pool_create("mine", 0, 0, None).unwrap();
            rig.heap.pool_enter(pool).unwrap();
            addresses.extend(sizes.map(|size| rig.malloc(size, DEFAULT)));
            rig.heap.pool_leave(pool).unwrap();
        }
        assert!(asked.times() >= 6, "{backing}");
        for address in addresses {
            assert!(rig.heap.free(address));
        }
        rig.check_order();
    }
}

#[test]
fn one_who_knows_nothing_leaves_blocks_as_they_are() {
    let (rig, asked) = asking("", false, Asked { is_dumb: true, ..Asked::default() });
    let address = rig.malloc(4 * MIB, DEFAULT);
    assert_eq!((asked.times(), &*told(&rig)[0][&address]), (1, ""));
}

#[test]
fn without_one_nothing_is_asked_and_no_site_is_on_the_record() {
    let rig = Rig::new("record:on");
    rig.malloc(4 * MIB, DEFAULT);
    rig.malloc(1000, DEFAULT);
    assert!(Reader::own(rig.heap.record()).unwrap().sites().is_empty());
}
