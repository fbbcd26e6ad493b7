//! What the record costs a malloc and a free, in instructions and in time, and what timing costs a
//! call of the driver.
//!
//! ```text
//! cargo bench --bench record_cost                    # nanoseconds, one and two threads
//! program=$(echo target/release/deps/record_cost-*)
//! valgrind --tool=callgrind --toggle-collect='*hot_malloc*' $program instructions
//! valgrind --tool=callgrind --toggle-collect='*hot_free*'   $program instructions
//! valgrind --tool=callgrind --toggle-collect='*hot_growth*' $program instructions
//! ```
//! The second form prints instructions collected; divided by the number of operations the program
//! printed, they are the cost of `block_insert` + `event` (or `block_remove` + `event`), the
//! clock's read and the call itself included.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use gruyere::driver::{Driver, StreamHandle};
use gruyere::heap::driver::timed::{OnRecord, Timed};
use gruyere::record::{
    BlockEntry, BlockSlot, DeviceFacts, EventKind, Record, RecordOptions, ShardWriter, clock,
};
use gruyere_phantom::{Config as GpuConfig, Costs, Gpu};
use gruyere_phantom_driver::PhantomDriver;

#[inline(never)]
fn hot_malloc(shard: &mut ShardWriter, entry: &BlockEntry) -> BlockSlot {
    let slot = shard.block_insert(entry);
    let time = clock::now();
    shard.event(EventKind::Malloc, entry.lifetime, entry.stream, entry.address, entry.size, time);
    slot
}

#[inline(never)]
fn hot_free(shard: &mut ShardWriter, entry: &BlockEntry, slot: BlockSlot) {
    shard.block_remove(slot, entry.size, entry.requested, entry.lifetime, false);
    let time = clock::now();
    shard.event(EventKind::Free, entry.lifetime, entry.stream, entry.address, entry.size, time);
}

/// Blocks that are never freed: each makes a new peak.
#[inline(never)]
fn hot_growth(shard: &mut ShardWriter, entry: &BlockEntry) {
    shard.block_insert(entry);
}

/// Mallocs and frees 64 blocks at a time, `rounds` times; how many operations.
fn work(mut shard: ShardWriter, rounds: u64) -> u64 {
    let mut slots = [BlockSlot::NONE; 64];
    let mut operations = 0;
    for round in 0..rounds {
        let entry = |index: u64| BlockEntry {
            address: 0x7f00_0000_0000 + index * 0x10_0000,
            size: 512 * (1 + (round * 7 + index * 131) % 5000),
            requested: 500 + index,
            stream: 3,
            step: round as u32,
            lifetime: index as u8 % 4,
            ..BlockEntry::default()
        };
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = hot_malloc(&mut shard, &black_box(entry(index as u64)));
        }
        for (index, slot) in slots.iter().enumerate() {
            hot_free(&mut shard, &black_box(entry(index as u64)), *slot);
        }
        operations += 2 * slots.len() as u64;
    }
    operations
}

fn record(enabled: bool) -> &'static Record {
    let options = RecordOptions { enabled, ..RecordOptions::default() };
    let device = DeviceFacts { name: "bench".to_owned(), uuid: [0; 16], total_memory: 80 << 30 };
    Box::leak(Box::new(Record::create(&options, &[device])))
}

/// What timing adds to a call of the driver: the best of several rounds, nanoseconds. The driver is
/// the stand-in, which works for a while at each call, as a real one does: calls that do nothing
/// would make each wait for the writes of the one before.
fn timed_call() -> f64 {
    let config = GpuConfig { costs: Costs::zero(), oracle: false, ..GpuConfig::new(1 << 30) };
    let bare: Arc<dyn Driver> = Arc::new(PhantomDriver::new(Arc::new(Gpu::new(config))));
    let record = record(true);
    let timed: Arc<dyn Driver> = Arc::new(Timed::new(bare.clone(), OnRecord::new(record)));
    let round = |driver: &Arc<dyn Driver>| {
        const CALLS: u32 = 1000;
        let begin = Instant::now();
        for _ in 0..CALLS {
            let _ = black_box(black_box(driver).stream_synchronize(0, StreamHandle(0)));
        }
        begin.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    // Short rounds in turn: what else the machine does spares some of each.
    let (mut least_bare, mut least_timed) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..3000 {
        least_bare = least_bare.min(round(&bare));
        least_timed = least_timed.min(round(&timed));
    }
    let beyond = least_timed - least_bare;
    record.close();
    beyond
}

fn main() {
    if std::env::args().any(|argument| argument == "instructions") {
        let record = record(true);
        let operations = work(record.shard(0, 0), 1000);
        println!("{} mallocs, {} frees", operations / 2, operations / 2);
        // As many shards as the heap has.
        let mut shards: Vec<ShardWriter> = (1..18).map(|shard| record.shard(0, shard)).collect();
        for n in 0..1000 {
            hot_growth(
                &mut shards[0],
                &black_box(BlockEntry { size: 1 << 20, address: n << 20, ..BlockEntry::default() }),
            );
        }
        println!("1000 new peaks");
        return record.close();
    }
    for enabled in [true, false] {
        for threads in [1u32, 2] {
            let record = record(enabled);
            let begin = Instant::now();
            let operations: u64 = std::thread::scope(|scope| {
                let running: Vec<_> = (0..threads)
                    .map(|shard| scope.spawn(move || work(record.shard(0, shard), 50_000)))
                    .collect();
                running.into_iter().map(|thread| thread.join().expect("a worker")).sum()
            });
            let each = begin.elapsed().as_nanos() as f64 / operations as f64;
            println!(
                "record {}, {threads} thread(s): {each:.1} ns an operation",
                if enabled { "on" } else { "off" }
            );
            record.close();
        }
    }
    println!("a timed driver call: {:.1} ns beyond the call", timed_call());
}
