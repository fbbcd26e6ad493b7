//! Address space: finite, reserved in steps, released when useless; and no driver call crosses the
//! end of a reservation.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use crate::world::World;
use gruyere::driver::StreamHandle;
use gruyere::heap::Error;
use gruyere_phantom::{
    Backing, CallKind, Caller, CaptureMode, Config as GpuConfig, Gpu, Injection, as_program,
};

const TIB: u64 = 1 << 40;
const STITCH: &str = "backing:stitch,headroom:0";

fn rig(config: GpuConfig, conf: &str) -> Rig {
    let rig = Rig::over(config, conf);
    rig.heap.announce_hooks(3);
    rig
}

/// A heap over a driver with injectable faults.
fn world(config: GpuConfig) -> World {
    let world = World::over(config, STITCH);
    world.rig.heap.announce_hooks(3);
    world
}

/// A device with ordinary space reserved in steps: there is no room for twice the device at once.
fn short_of_addresses() -> GpuConfig {
    GpuConfig { address_bits: 33, ..GpuConfig::new(8 * GIB) }
}

/// Two of them.
fn two_short_of_addresses() -> GpuConfig {
    GpuConfig { address_bits: 33, ..GpuConfig::devices(2, 8 * GIB) }
}

/// Blocks that fill one reservation and begin the adjacent one.
fn over_two_reservations(rig: &Rig) -> Vec<u64> {
    let blocks: Vec<u64> = (0..3).map(|_| rig.malloc(512 * MIB, DEFAULT)).collect();
    assert_eq!(rig.gpu.held().reservations, 2);
    assert_eq!(
        [blocks[1], blocks[2]],
        [blocks[0] + 512 * MIB, blocks[0] + GIB],
        "the two are neighbours"
    );
    blocks
}

fn free_all(rig: &Rig, blocks: Vec<u64>) {
    blocks.into_iter().for_each(|block| assert!(rig.heap.free(block)));
}

fn calls(rig: &Rig, kind: CallKind) -> u64 {
    rig.gpu.counts(Caller::Allocator).of(kind)
}

/// A graph with its own memory, as torch.cuda.graph captures it: a large block and a small one,
/// both dropped at the end of the capture.
fn capture(rig: &Rig, pool: u64, stream: StreamHandle) -> Result<u64, Error> {
    rig.heap.begin_allocate_to_pool(0, (0, pool))?;
    as_program(|| rig.gpu.begin_capture(0, stream.0, CaptureMode::Global, Some(pool))).unwrap();
    let blocks = [3 * MIB, 1000].map(|size| rig.heap.malloc(size, 0, stream));
    as_program(|| rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
    for block in blocks {
        assert!(rig.heap.free(block?));
    }
    let graph = as_program(|| rig.gpu.end_capture(0, stream.0)).unwrap();
    rig.heap.end_allocate_to_pool(0, (0, pool))?;
    Ok(graph)
}

fn drop_graph(rig: &Rig, pool: u64, graph: u64) {
    as_program(|| rig.gpu.graph_destroy(0, graph)).unwrap();
    rig.heap.release_pool(0, (0, pool)).unwrap();
}

#[test]
fn a_thousand_graphs_live_in_eight_tebibytes_of_addresses() {
    let rig = rig(GpuConfig { address_bits: 43, ..GpuConfig::new(80 * GIB) }, STITCH);
    let stream = rig.stream();
    let graphs: Vec<u64> = (1..=1000)
        .map(|pool| {
            capture(&rig, pool, stream).unwrap_or_else(|error| panic!("graph {pool}: {error}"))
        })
        .collect();
    rig.check();
    let peak = rig.gpu.address_books().peak;
    assert!(peak < 8 * TIB, "{} GiB", peak / GIB);
    for (pool, graph) in (1..).zip(graphs) {
        drop_graph(&rig, pool, graph);
    }
    rig.heap.trim();
    rig.heap.trim();
    assert!(rig.gpu.held().reservations <= 4, "{:?}", rig.gpu.held());
    rig.finish();
}

#[test]
fn a_program_with_graphs_fits_into_two_tebibytes_of_addresses() {
    let rig = rig(GpuConfig { address_bits: 41, ..GpuConfig::new(80 * GIB) }, STITCH);
    let stream = rig.stream();
    let graphs: Vec<u64> = (1..=200).map(|pool| capture(&rig, pool, stream).unwrap()).collect();
    // Steps of a program with sizes that never repeat, on two streams, close to the device's
    // memory.
    let mut live = Vec::new();
    for step in 0..60u64 {
        for i in 0..40 {
            let size = (1 + (step * 7919 + i * 104_729) % 1900) * MIB;
            let on = if i % 3 == 0 { stream } else { DEFAULT };
            live.push((size, rig.malloc(size, on)));
            while live.iter().map(|block| block.0).sum::<u64>() > 60 * GIB {
                let (_, block) = live.swap_remove((step * 31 + i * 17) as usize % live.len());
                assert!(rig.heap.free(block));
            }
        }
        rig.heap.mark_step();
    }
    rig.check();
    let peak = rig.gpu.address_books().peak;
    assert!(peak < 2 * TIB, "{} GiB", peak / GIB);
    free_all(&rig, live.into_iter().map(|block| block.1).collect());
    for (pool, graph) in (1..).zip(graphs) {
        drop_graph(&rig, pool, graph);
    }
    rig.finish();
}

#[test]
fn devices_for_which_no_addresses_are_left_begin_in_steps() {
    // Six times twice 80 GiB.
    let rig = rig(GpuConfig { address_bits: 40, ..GpuConfig::devices(8, 80 * GIB) }, STITCH);
    let blocks = (0..8).map(|device| rig.heap.malloc(3 * GIB, device, DEFAULT).unwrap()).collect();
    assert!(rig.gpu.address_books().reserved < TIB);
    rig.check();
    free_all(&rig, blocks);
    rig.heap.trim();
    assert_eq!((0..8).map(|device| rig.gpu.books(device).physical).sum::<u64>(), 0);
    rig.check();
}

#[test]
fn what_is_reserved_begins_at_a_page_whatever_the_drivers_default_is() {
    let config = GpuConfig { default_alignment: 64 << 10, ..short_of_addresses() };
    assert_ne!(Gpu::new(config.clone()).address_reserve(0, GIB, 0).unwrap() % (2 * MIB), 0);
    let rig = rig(config, STITCH);
    let blocks = over_two_reservations(&rig);
    free_all(&rig, blocks);
    rig.finish();
}

#[test]
fn an_out_of_memory_for_want_of_addresses_says_so_and_passes() {
    let rig = rig(GpuConfig { address_bits: 32, ..GpuConfig::new(80 * GIB) }, STITCH);
    let mut blocks = Vec::new();
    let refused = loop {
        match rig.heap.malloc(GIB, 0, DEFAULT) {
            Ok(block) => blocks.push(block),
            Err(error) => break error,
        }
    };
    assert_eq!(blocks.len(), 4, "all that there is: 4 GiB");
    let Error::OutOfMemory(report) = refused else { panic!("{refused}") };
    assert_eq!(report.addresses, Some(4 * GIB));
    assert!(report.to_string().contains("Address space ran out, not memory"), "{report}");
    // Useless reservations make room for requests that fit nowhere else.
    free_all(&rig, blocks);
    let long = rig.malloc(3 * GIB, DEFAULT);
    rig.check();
    // If memory runs out, the report does not blame addresses.
    rig.gpu.set_taken(0, 77 * GIB);
    let Err(Error::OutOfMemory(report)) = rig.heap.malloc(GIB / 2, 0, DEFAULT) else {
        panic!("served")
    };
    assert_eq!(report.addresses, None);
    assert!(rig.heap.free(long));
    rig.finish();
}

#[test]
fn a_trim_gives_idle_addresses_back_but_for_what_the_next_step_begins_with() {
    let rig = rig(short_of_addresses(), STITCH);
    let blocks = over_two_reservations(&rig);
    free_all(&rig, blocks);
    rig.heap.trim();
    assert_eq!(rig.gpu.held().reservations, 1);
    let reserved = calls(&rig, CallKind::AddressReserve);
    for _ in 0..10 {
        let block = rig.malloc(300 * MIB, DEFAULT);
        assert!(rig.heap.free(block));
        rig.heap.trim();
    }
    assert_eq!(calls(&rig, CallKind::AddressReserve), reserved, "what is kept is enough");
    rig.finish();
}

#[test]
fn free_memory_is_not_joined_over_the_end_of_a_reservation() {
    let rig = rig(short_of_addresses(), STITCH);
    let blocks = over_two_reservations(&rig);
    let first = blocks[0];
    free_all(&rig, blocks);
    let long = rig.malloc(1536 * MIB, DEFAULT);
    assert_eq!(rig.gpu.held().reservations, 3);
    assert!(
        !(first..first + 2 * GIB).contains(&long),
        "{long:#x} begins where {first:#x} was, and has no room there"
    );
    rig.check();
    assert!(rig.heap.free(long));
    rig.finish();
}

#[test]
fn mappings_in_two_reservations_are_unmapped_by_two_calls() {
    let rig = rig(short_of_addresses(), STITCH);
    let blocks = over_two_reservations(&rig);
    free_all(&rig, blocks);
    rig.heap.trim();
    assert_eq!(calls(&rig, CallKind::Unmap), 2);
    assert_eq!(rig.gpu.books(0).physical, 0);
    rig.finish();
}

/// The bytes of the mapping over `address`.
fn mapping_at(rig: &Rig, address: u64) -> u64 {
    let holds = |piece: &&Backing| (piece.address..piece.address + piece.bytes).contains(&address);
    rig.gpu.all_backings().iter().find(holds).unwrap().bytes
}

#[test]
fn a_mapping_that_cannot_be_unmapped_keeps_no_other() {
    let World { rig, driver, .. } = world(short_of_addresses());
    let blocks = over_two_reservations(&rig);
    let bad = blocks[0] + 100 * MIB;
    let chunk = mapping_at(&rig, bad);
    driver.refuse_at(bad);
    free_all(&rig, blocks);
    rig.heap.trim();
    rig.check();
    assert_eq!(rig.gpu.books(0).physical, chunk);
    let tries = calls(&rig, CallKind::Unmap);
    rig.heap.trim();
    assert_eq!(rig.gpu.books(0).physical, chunk);
    assert_eq!(calls(&rig, CallKind::Unmap), tries, "it has been made for no other since");
    // Nor mappings that become adjacent.
    let block = rig.malloc(128 * MIB, DEFAULT);
    assert!(rig.heap.free(block));
    rig.heap.trim();
    rig.check();
    assert_eq!(rig.gpu.books(0).physical, chunk);
    driver.refuse_at(0);
    rig.finish();
}

/// The numbers of mappings from `address` on that only their own device reaches, and that the other
/// reaches too.
fn reached(rig: &Rig, address: u64, bytes: u64) -> [usize; 2] {
    let pieces = rig.gpu.backing(address, bytes);
    [0b01, 0b11].map(|access| pieces.iter().filter(|piece| piece.access == access).count())
}

#[test]
fn a_peer_reaches_mappings_in_every_reservation() {
    let rig = rig(two_short_of_addresses(), STITCH);
    let mut blocks = over_two_reservations(&rig);
    let mappings = rig.gpu.backing(blocks[0], 3 * GIB / 2).len();
    blocks.push(rig.heap.malloc(1, 1, DEFAULT).unwrap());
    assert_eq!(reached(&rig, blocks[0], 3 * GIB / 2), [0, mappings]);
    rig.check();
    free_all(&rig, blocks);
    rig.finish();
}

#[test]
fn a_mapping_that_a_peer_is_refused_keeps_it_from_no_other_and_is_asked_for_again() {
    let World { rig, driver, .. } = world(two_short_of_addresses());
    let mut blocks = over_two_reservations(&rig);
    let mappings = rig.gpu.backing(blocks[0], 3 * GIB / 2).len();
    driver.refuse_at(blocks[0] + 100 * MIB);
    blocks.push(rig.heap.malloc(1, 1, DEFAULT).unwrap());
    assert_eq!(reached(&rig, blocks[0], 3 * GIB / 2), [1, mappings - 1]);
    driver.refuse_at(0);
    blocks.push(rig.malloc(128 * MIB, DEFAULT));
    assert_eq!(reached(&rig, blocks[0], 3 * GIB / 2), [0, mappings]);
    free_all(&rig, blocks);
    rig.finish();
}

#[test]
fn a_row_that_is_refused_access_gets_it_mapping_by_mapping() {
    let rig = rig(short_of_addresses(), STITCH);
    rig.gpu.inject(Injection {
        kind: Some(CallKind::SetAccess),
        nth: 1,
        code: 1,
        from_then_on: false,
    });
    let block = rig.malloc(256 * MIB, DEFAULT);
    let mappings = reached(&rig, block, 256 * MIB)[0];
    assert!(mappings > 1);
    assert_eq!(calls(&rig, CallKind::SetAccess), 1 + mappings as u64);
    assert!(rig.heap.free(block));
    rig.finish();
}

#[test]
fn memory_is_served_where_a_peer_is_refused_it() {
    let World { rig, driver, .. } = world(two_short_of_addresses());
    let mut blocks = vec![rig.heap.malloc(1, 1, DEFAULT).unwrap(), rig.malloc(1, DEFAULT)];
    driver.refuse_peers(true);
    let block = rig.malloc(256 * MIB, DEFAULT);
    // The block may begin in an older mapping.
    let [alone, shared] = reached(&rig, block + 128 * MIB, 128 * MIB);
    assert!(alone > 0 && shared == 0, "{alone}, {shared}");
    driver.refuse_peers(false);
    blocks.extend([block, rig.malloc(256 * MIB, DEFAULT)]);
    assert_eq!(reached(&rig, block, 512 * MIB)[0], 0);
    rig.check();
    free_all(&rig, blocks);
    rig.finish();
}

#[test]
fn pages_are_stitched_wherever_the_granularity_divides_them() {
    for granularity in [64 << 10, 512 << 10, 2 * MIB] {
        let mut config = GpuConfig::new(8 * GIB);
        config.devices[0].granularity = granularity;
        let rig = rig(config, "backing:auto,headroom:0");
        let blocks: Vec<u64> =
            [1000, 3 * MIB, 300 * MIB].map(|size| rig.malloc(size, DEFAULT)).into();
        assert!(rig.gpu.held().handles > 0, "{granularity}");
        assert!(rig.gpu.all_backings().iter().all(|piece| piece.address % (2 * MIB) == 0));
        free_all(&rig, blocks);
        rig.finish();
    }
}

#[test]
fn pages_are_not_stitched_where_the_granularity_is_longer() {
    for conf in ["backing:auto,headroom:0", STITCH] {
        let mut config = GpuConfig::new(8 * GIB);
        config.devices[0].granularity = 4 * MIB;
        let rig = rig(config, conf);
        let block = rig.malloc(3 * MIB, DEFAULT);
        assert_eq!((rig.gpu.held().handles, rig.gpu.held().pools), (0, 1));
        assert!(rig.heap.free(block));
        rig.finish();
    }
}

/// Old mappings at the end of a program with enough page moves that the heap unmaps in batches; the
/// program, and its blocks.
fn moves(conf: &str) -> (Rig, Vec<u64>, usize) {
    let rig = Rig::over(GpuConfig::new(80 * GIB), conf);
    rig.heap.announce_hooks(3);
    let mut blocks: Vec<u64> = Vec::new();
    let mut handed: std::collections::BTreeSet<u64> = std::collections::BTreeSet::new();
    for round in 0..20u64 {
        for n in 0..200u64 {
            let bytes = (2 + 3 * round + n % 5) * MIB + 512 * n;
            if let Ok(address) = rig.heap.malloc(bytes, 0, DEFAULT) {
                handed.extend((0..bytes / (2 * MIB)).map(|page| address + page * 2 * MIB));
                blocks.push(address);
            }
        }
        let mut number = round;
        blocks.retain(|&address| {
            number += 1;
            number % 4 == 0 || !rig.heap.free(address)
        });
    }
    let gone = handed.iter().filter(|&&address| !rig.gpu.is_backed(address, 1)).count();
    (rig, blocks, gone)
}

#[test]
fn for_debugging_what_was_freed_stays_mapped_until_memory_is_given_back() {
    let (rig, blocks, gone) = moves("slack:0%");
    assert!(gone > 0, "the program moves pages, and old mappings go");
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    rig.finish();
    let (rig, blocks, gone) = moves("slack:0%,debug:mapped");
    assert_eq!(gone, 0, "whoever uses memory after its free reads stale data, and does not fault");
    // Not at the price of an out of memory.
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    let all = rig.malloc(80 * GIB - 600 * MIB, DEFAULT);
    assert!(rig.heap.free(all));
    rig.finish();
}
