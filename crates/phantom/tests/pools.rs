//! Promises of stream-ordered pools.

use gruyere_phantom::error::code;
use gruyere_phantom::{
    AddressProvider, Config, Costs, CountingAddresses, Gpu, PoolAttribute, StreamKind,
};
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

fn gpu(capacity: u64) -> Gpu {
    Gpu::new(Config { costs: Costs::zero(), ..Config::new(capacity) })
}

fn stream(gpu: &Gpu) -> usize {
    gpu.stream_create(0, StreamKind::NonBlocking).unwrap()
}

fn read(gpu: &Gpu, pool: usize, attribute: PoolAttribute) -> u64 {
    gpu.pool_attribute(0, pool, attribute).unwrap()
}

#[test]
fn growth_in_multiples_of_32_mib() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_alloc(0, pool, 1, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 32 * MIB);
    gpu.pool_alloc(0, pool, 31 * MIB, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 32 * MIB, "it still fits");
    gpu.pool_alloc(0, pool, 33 * MIB, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 96 * MIB);
    assert_eq!(read(&gpu, pool, PoolAttribute::UsedCurrent), 64 * MIB + 512);
}

#[test]
fn blocks_lie_across_chunks() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    let blocks = [0, 1].map(|_| gpu.pool_alloc(0, pool, 32 * MIB, 0).unwrap());
    for block in blocks {
        gpu.pool_free(0, block, 0).unwrap();
    }
    let block = gpu.pool_alloc(0, pool, 40 * MIB, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 64 * MIB);
    gpu.pool_alloc(0, pool, 50 * MIB, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 96 * MIB, "what is free at the end is part of it");
    assert_eq!(gpu.backing(block, 40 * MIB).iter().map(|b| b.bytes).sum::<u64>(), 40 * MIB);
    let whole = gpu.allocation(block + 35 * MIB).unwrap();
    assert_eq!((whole.address, whole.bytes), (block, 40 * MIB));
    assert_eq!(gpu.held().pool_allocations, 2);
}

#[test]
fn idle_chunks_move_to_where_a_block_has_no_room() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    let blocks = [0; 6].map(|_| gpu.pool_alloc(0, pool, 32 * MIB, 0).unwrap());
    for at in [0, 2, 4] {
        gpu.pool_free(0, blocks[at], 0).unwrap();
    }
    let large = gpu.pool_alloc(0, pool, 90 * MIB, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 192 * MIB);
    assert_eq!(read(&gpu, pool, PoolAttribute::ReservedHigh), 192 * MIB);
    assert!(large > blocks[5] && gpu.is_backed(large, 90 * MIB));
    assert!(!gpu.is_backed(blocks[0], MIB));
    assert_eq!((gpu.faults(), gpu.misuses()), (vec![], vec![]));
}

/// Plain numbers, and the ranges that memory has left.
#[derive(Default)]
struct Told {
    numbers: CountingAddresses,
    vacated: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl AddressProvider for Told {
    fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        self.numbers.reserve(bytes, align)
    }

    fn release(&mut self, address: u64, bytes: u64) {
        self.numbers.release(address, bytes);
    }

    fn vacated(&mut self, address: u64, bytes: u64) {
        self.vacated.lock().unwrap().push((address, bytes));
    }
}

#[test]
fn what_lay_in_a_chunk_is_lost_when_it_moves_or_goes_back() {
    let told = Told::default();
    let vacated = Arc::clone(&told.vacated);
    let config = Config { costs: Costs::zero(), ..Config::new(1024 * MIB) };
    let gpu = Gpu::with_addresses(config, Box::new(told));
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    let blocks = [0; 3].map(|_| gpu.pool_alloc(0, pool, 32 * MIB, 0).unwrap());
    gpu.pool_free(0, blocks[0], 0).unwrap();
    let large = gpu.pool_alloc(0, pool, 60 * MIB, 0).unwrap();
    assert_eq!(*vacated.lock().unwrap(), [(blocks[0], 32 * MIB)]);
    gpu.pool_free(0, large, 0).unwrap();
    gpu.pool_trim(0, pool, 0).unwrap();
    let mut gone = vacated.lock().unwrap().clone();
    gone.sort_unstable();
    assert_eq!(gone, [blocks[0], large, large + 32 * MIB].map(|at| (at, 32 * MIB)));
}

#[test]
fn memory_that_a_kernel_still_uses_does_not_move() {
    let gpu = gpu(96 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let (a, b) = (stream(&gpu), stream(&gpu));
    let blocks = [a, b].map(|stream| gpu.pool_alloc(0, pool, 32 * MIB, stream).unwrap());
    gpu.launch(0, a, 1, 1_000).unwrap();
    gpu.pool_free(0, blocks[0], a).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, 64 * MIB, b).unwrap_err().code, code::OUT_OF_MEMORY);
    gpu.host_spend(1_000);
    gpu.pool_alloc(0, pool, 64 * MIB, b).unwrap();
    assert_eq!(gpu.books(0).physical, 96 * MIB);
    assert_eq!(gpu.faults(), []);
}

#[test]
fn holes_close_and_the_best_fit_wins() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let at: Vec<u64> = [4, 4, 2, 2, 20]
        .iter()
        .map(|&mib| gpu.pool_alloc(0, pool, mib * MIB, 0).unwrap())
        .collect();
    gpu.pool_free(0, at[0], 0).unwrap();
    gpu.pool_free(0, at[2], 0).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, 2 * MIB, 0).unwrap(), at[2], "the smaller hole");
    gpu.pool_free(0, at[1], 0).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, 8 * MIB, 0).unwrap(), at[0], "two holes are one");
    assert_eq!(gpu.books(0).physical, 32 * MIB);
}

#[test]
fn addresses_are_aligned() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let small = gpu.pool_alloc(0, pool, 1000, 0).unwrap();
    let next = gpu.pool_alloc(0, pool, 1, 0).unwrap();
    assert_eq!((small % 512, next - small), (0, 1024));
    for _ in 0..15 {
        assert_eq!(gpu.pool_alloc(0, pool, 2 * MIB, 0).unwrap() % (2 * MIB), 0);
    }
    assert_eq!(gpu.books(0).physical, 32 * MIB);
}

#[test]
fn freed_memory_serves_its_own_stream_at_once_and_others_when_the_free_is_done() {
    let gpu = gpu(64 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let (a, b) = (stream(&gpu), stream(&gpu));
    let block = gpu.pool_alloc(0, pool, 32 * MIB, a).unwrap();
    gpu.launch(0, a, 1, 1_000_000).unwrap();
    gpu.pool_free(0, block, a).unwrap();
    let other = gpu.pool_alloc(0, pool, 32 * MIB, b).unwrap();
    assert_ne!(other, block, "the kernel still runs");
    assert_eq!(gpu.pool_alloc(0, pool, 32 * MIB, b).unwrap_err().code, code::OUT_OF_MEMORY);
    assert_eq!(gpu.pool_alloc(0, pool, 32 * MIB, a).unwrap(), block);
    gpu.pool_free(0, block, a).unwrap();
    gpu.host_spend(1_000_000);
    assert_eq!(gpu.pool_alloc(0, pool, 32 * MIB, b).unwrap(), block, "now it is done");
}

#[test]
fn without_the_opportunistic_policy_others_wait_for_a_synchronisation() {
    let gpu = gpu(64 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReuseAllowOpportunistic, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
    let (a, b) = (stream(&gpu), stream(&gpu));
    let block = gpu.pool_alloc(0, pool, 32 * MIB, a).unwrap();
    gpu.pool_free(0, block, a).unwrap();
    let fresh = gpu.pool_alloc(0, pool, 32 * MIB, b).unwrap();
    assert_ne!(fresh, block);
    gpu.stream_synchronize(0, a).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, 32 * MIB, b).unwrap(), block);
}

#[test]
fn the_release_threshold_is_honoured_at_a_synchronisation() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReleaseThreshold, 40 * MIB).unwrap();
    let blocks = [0; 4].map(|_| gpu.pool_alloc(0, pool, 32 * MIB, 0).unwrap());
    for block in blocks {
        gpu.pool_free(0, block, 0).unwrap();
    }
    assert_eq!(read(&gpu, pool, PoolAttribute::ReservedCurrent), 128 * MIB, "not before");
    gpu.stream_synchronize(0, 0).unwrap();
    assert_eq!(
        read(&gpu, pool, PoolAttribute::ReservedCurrent),
        64 * MIB,
        "the threshold stays held"
    );
    assert_eq!(gpu.books(0).in_pools, 64 * MIB);
}

#[test]
fn trim_keeps_what_it_is_told_to_and_what_is_in_use() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let blocks = [0; 4].map(|_| gpu.pool_alloc(0, pool, 32 * MIB, 0).unwrap());
    gpu.pool_free(0, blocks[1], 0).unwrap();
    gpu.pool_free(0, blocks[2], 0).unwrap();
    gpu.pool_free(0, blocks[3], 0).unwrap();
    gpu.pool_trim(0, pool, 90 * MIB).unwrap();
    assert_eq!(gpu.books(0).physical, 96 * MIB);
    gpu.pool_trim(0, pool, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 32 * MIB);
    assert!(gpu.is_backed(blocks[0], 32 * MIB));
}

#[test]
fn trim_keeps_memory_whose_free_is_not_done() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let a = stream(&gpu);
    let block = gpu.pool_alloc(0, pool, MIB, a).unwrap();
    gpu.launch(0, a, 1, 500).unwrap();
    gpu.pool_free(0, block, a).unwrap();
    gpu.pool_trim(0, pool, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 32 * MIB);
    gpu.host_spend(500);
    gpu.pool_trim(0, pool, 0).unwrap();
    assert_eq!(gpu.books(0).physical, 0);
}

#[test]
fn high_marks_stay_until_they_are_reset() {
    let gpu = gpu(1024 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let block = gpu.pool_alloc(0, pool, 40 * MIB, 0).unwrap();
    gpu.pool_free(0, block, 0).unwrap();
    gpu.pool_trim(0, pool, 0).unwrap();
    assert_eq!(read(&gpu, pool, PoolAttribute::UsedHigh), 40 * MIB);
    assert_eq!(read(&gpu, pool, PoolAttribute::ReservedHigh), 64 * MIB);
    gpu.pool_set_attribute(0, pool, PoolAttribute::UsedHigh, 0).unwrap();
    gpu.pool_set_attribute(0, pool, PoolAttribute::ReservedHigh, 0).unwrap();
    assert_eq!(read(&gpu, pool, PoolAttribute::UsedHigh), 0);
    assert_eq!(read(&gpu, pool, PoolAttribute::ReservedHigh), 0);
}

#[test]
fn max_size_bounds_the_pool_and_capacity_the_device() {
    let gpu = gpu(128 * MIB);
    let pool = gpu.pool_create(0, 64 * MIB).unwrap();
    gpu.pool_alloc(0, pool, 40 * MIB, 0).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, 40 * MIB, 0).unwrap_err().code, code::OUT_OF_MEMORY);
    gpu.set_taken(0, 40 * MIB);
    let other = gpu.pool_create(0, 0).unwrap();
    assert_eq!(
        gpu.pool_alloc(0, other, MIB, 0).unwrap_err().code,
        code::OUT_OF_MEMORY,
        "a chunk has no room"
    );
    gpu.set_taken(0, 32 * MIB);
    gpu.pool_alloc(0, other, MIB, 0).unwrap();
    assert_eq!(gpu.memory_info(0), Ok((0, 128 * MIB)));
}

#[test]
fn a_pool_without_a_bound_takes_twice_the_memory_in_address_space() {
    let gpu = Gpu::new(Config { address_bits: 30, ..Config::new(256 * MIB) });
    let bounded = gpu.pool_create(0, 64 * MIB).unwrap();
    assert_eq!(gpu.address_books().reserved, 64 * MIB);
    gpu.pool_create(0, 0).unwrap();
    assert_eq!(gpu.address_books().reserved, 64 * MIB + 512 * MIB);
    assert_eq!(
        gpu.pool_create(0, 0).unwrap_err().code,
        code::OUT_OF_MEMORY,
        "address space is exhausted"
    );
    gpu.pool_destroy(0, bounded).unwrap();
    gpu.pool_create(0, 0).unwrap();
    assert_eq!(gpu.address_books().peak, 1024 * MIB);
}

#[test]
fn a_peer_is_let_in() {
    let gpu = Gpu::new(Config::devices(2, 256 * MIB));
    let pool = gpu.pool_create(0, 0).unwrap();
    let before = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    gpu.pool_allow_peer(0, pool, 1).unwrap();
    let after = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    assert_eq!([before, after].map(|at| gpu.backing(at, MIB)[0].access), [3, 3]);
}

#[test]
fn a_free_on_the_default_stream_comes_after_blocking_streams() {
    let gpu = gpu(64 * MIB);
    let pool = gpu.pool_create(0, 0).unwrap();
    let (blocking, other) = (gpu.stream_create(0, StreamKind::Blocking).unwrap(), stream(&gpu));
    let span = gpu.pool_alloc(0, pool, 32 * MIB, blocking).unwrap();
    gpu.block_malloc(1, span, 32 * MIB, 0, blocking);
    gpu.launch(0, blocking, 1, 500).unwrap();
    gpu.block_free(span);
    gpu.pool_free(0, span, 0).unwrap();
    assert_ne!(gpu.pool_alloc(0, pool, 32 * MIB, other), Ok(span), "the kernel still runs");
    gpu.host_spend(500);
    assert_eq!(gpu.pool_alloc(0, pool, 32 * MIB, other), Ok(span));
    assert_eq!(gpu.faults(), []);
}
