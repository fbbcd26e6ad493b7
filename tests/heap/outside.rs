//! Pools with memory from outside, in whole segments: only the given segments serve them, and each
//! comes out again whole, once, when no work uses it.

use crate::common::{DEFAULT, GIB, KEEPING, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, PoolError, PoolKey};

/// A pool of the rig, with segments from the driver.
struct Outside<'a> {
    rig: &'a Rig,
    key: PoolKey,
    brought: Vec<(u64, u64)>,
}

impl<'a> Outside<'a> {
    fn new(rig: &'a Rig, split: bool) -> Self {
        let key = rig.heap.pool_create("outside", 0, 0, None).unwrap();
        rig.heap.pool_from_outside(key, split).unwrap();
        Self { rig, key, brought: Vec::new() }
    }

    /// A block from the given segments.
    fn ask(&self, size: u64, stream: StreamHandle) -> Result<u64, Error> {
        self.rig.heap.pool_enter(self.key).unwrap();
        let answer = self.rig.heap.malloc(size, 0, stream);
        self.rig.heap.pool_leave(self.key).unwrap();
        answer
    }

    /// The same, with a new segment if needed.
    fn malloc(&mut self, size: u64, stream: StreamHandle) -> u64 {
        let bytes = match self.ask(size, stream) {
            Err(Error::NoSegment(bytes)) => bytes,
            other => return other.unwrap(),
        };
        let address = self.rig.heap.plain_segment(self.key, bytes).unwrap();
        self.rig.heap.pool_bring(self.key, size, address, bytes).unwrap();
        self.brought.push((address, bytes));
        self.rig.heap.validate().unwrap();
        let block = self.ask(size, stream).unwrap();
        assert!((address..address + bytes).contains(&block));
        block
    }

    /// Takes out idle segments and returns them to the driver.
    fn take(&mut self) -> usize {
        let taken = self.rig.heap.pool_take(self.key);
        for segment in &taken {
            let at = self.brought.iter().position(|brought| brought == segment).unwrap();
            self.brought.remove(at);
            self.rig.heap.free_plain(self.key, segment.0).unwrap();
        }
        self.rig.heap.validate().unwrap();
        taken.len()
    }
}

#[test]
fn a_pool_is_served_by_what_was_brought_alone_and_nobody_else_is() {
    for backing in KEEPING {
        let rig = Rig::new(&format!("{backing},record:on"));
        let mut pool = Outside::new(&rig, true);
        let ordinary = rig.malloc(3 * MIB, DEFAULT);
        let blocks = [pool.malloc(1000, DEFAULT), pool.malloc(5 * MIB, DEFAULT)];
        assert_eq!(pool.brought.len(), 2, "small blocks lie in segments of their own");
        let more = [pool.malloc(MIB, DEFAULT), pool.malloc(5 * MIB, DEFAULT)];
        assert_eq!(pool.brought.len(), 2);
        let stats = rig.heap.stats(0).unwrap();
        assert!(
            stats.reserved >= 22 * MIB + 3 * MIB && stats.reserved == rig.gpu.books(0).physical
        );
        let held = rig.heap.pool_stats(pool.key).unwrap();
        assert_eq!((held.held, held.live_blocks), (22 * MIB, 4));
        // Neither a trim nor a request of others takes what lies idle in it.
        let idle = pool.malloc(12 * MIB, DEFAULT);
        for block in more.into_iter().chain([idle]) {
            assert!(rig.heap.free(block));
        }
        rig.heap.trim();
        assert_eq!(rig.heap.pool_stats(pool.key).unwrap().held, 34 * MIB);
        let others = rig.malloc(4 * MIB, DEFAULT);
        assert!(!pool.brought.iter().any(|&(at, bytes)| (at..at + bytes).contains(&others)));
        assert_eq!((pool.take(), pool.take()), (1, 0), "blocks are live in both others");
        for block in blocks {
            assert!(rig.heap.free(block));
        }
        assert_eq!((pool.take(), pool.take()), (2, 0), "each comes out once");
        assert!(rig.heap.pool_forget(pool.key));
        for block in [ordinary, others] {
            assert!(rig.heap.free(block));
        }
        rig.heap.trim();
        rig.heap.validate().unwrap();
        assert_eq!((rig.gpu.books(0).physical, rig.gpu.misuses().len()), (0, 0));
    }
}

#[test]
fn a_block_that_another_stream_uses_waits_for_it_and_so_does_its_segment() {
    let rig = Rig::new("backing:stitch");
    let mut pool = Outside::new(&rig, true);
    let side = rig.stream();
    let block = pool.malloc(12 * MIB, DEFAULT);
    rig.gpu.block_malloc(1, block, 12 * MIB, 0, DEFAULT.0);
    gruyere_phantom::as_program(|| rig.gpu.launch(0, side.0, 1, 50_000_000)).unwrap();
    assert!(rig.heap.record_stream(block, side));
    rig.gpu.block_free(block);
    assert!(rig.heap.free(block));
    assert!(matches!(pool.ask(12 * MIB, DEFAULT), Err(Error::NoSegment(_))), "it is still used");
    assert_eq!(pool.take(), 1, "the device is synchronised for that");
    assert_eq!(rig.gpu.faults(), []);
    rig.heap.validate().unwrap();
}

#[test]
fn without_splits_a_segment_has_one_block() {
    let rig = Rig::new("backing:stitch,record:on");
    let mut pool = Outside::new(&rig, false);
    let blocks = [MIB, MIB, 5 * MIB, 5 * MIB].map(|size| pool.malloc(size, DEFAULT));
    assert_eq!(pool.brought.len(), 4);
    for block in blocks {
        assert!(rig.heap.free(block));
        rig.heap.validate().unwrap();
    }
    let again = pool.malloc(8 * MIB, DEFAULT);
    assert!(blocks[2..].contains(&again), "a free segment serves whole");
    assert!(rig.heap.free(again));
    assert_eq!(pool.take(), 4);
}

#[test]
fn what_cannot_be_managed_is_refused_and_stays_its_makers() {
    let rig = Rig::bare(GIB, "backing:stitch,headroom:0");
    rig.heap.announce_hooks(3);
    let mut pool = Outside::new(&rig, true);
    for address in [(1 << 40) + 256, 1 << 48] {
        let refused = rig.heap.pool_bring(pool.key, MIB, address, 2 * MIB);
        assert!(matches!(refused, Err(PoolError::Segment(at)) if at == address));
    }
    assert!(!rig.heap.pool_has_room(pool.key, 2 * GIB));
    assert!(matches!(rig.heap.pool_release(pool.key), Err(PoolError::Outside(_))));
    // A pool with memory keeps its source.
    let kept = rig.heap.pool_create("kept", 0, 2 * MIB, None).unwrap();
    assert!(matches!(rig.heap.pool_from_outside(kept, true), Err(PoolError::Begun(_))));
    let block = pool.malloc(MIB, DEFAULT);
    assert!(matches!(rig.heap.pool_from_outside(pool.key, false), Err(PoolError::Begun(_))));
    let Error::OutOfMemory(report) = rig.heap.pool_refusal(pool.key, 7 * MIB, DEFAULT) else {
        panic!("no out-of-memory")
    };
    assert_eq!(report.pool.map(|note| (note.held, note.live)), Some((2 * MIB, MIB)));
    assert!(rig.heap.free(block));
    assert_eq!(pool.take(), 1);
    assert!(rig.heap.pool_forget(pool.key) && rig.heap.pool_forget(pool.key));
    // A segment for a pool that is gone, and for one with memory of the heap's.
    let refused = rig.heap.pool_bring(pool.key, MIB, 1 << 40, 2 * MIB);
    assert!(matches!(refused, Err(PoolError::NoSuchPool(key)) if key == pool.key), "{refused:?}");
    let refused = rig.heap.pool_bring(kept, MIB, 1 << 40, 2 * MIB);
    assert!(matches!(refused, Err(PoolError::Begun(key)) if key == kept), "{refused:?}");
}
