//! Memory that processes share: what a receiver maps is the sender's block, for as long as it
//! lives, and nothing is lost whatever fails. Sender and receiver are two heaps on one GPU.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Random, Rig};
use crate::flaky;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::{Extent, Heap, NotImported, NotOffered, Offer};
use gruyere_phantom::{Backing, CaptureMode, Config as GpuConfig, Gpu, as_program};
use std::collections::{HashMap, VecDeque};

/// What a receiver calls a sender's memory.
fn name(extent: Extent) -> Vec<u8> {
    [extent.address, extent.bytes, extent.newest].map(u64::to_le_bytes).as_flattened().to_vec()
}

/// The receiver's address of a sender's block. The chunks come `batch` at a time.
fn receive(
    sender: &Heap,
    receiver: &Heap,
    block: u64,
    batch: usize,
) -> Result<(u64, Extent), NotImported> {
    let Ok(Offer::Chunks(extent)) = sender.offer(block) else { panic!("{block:#x}: no chunks") };
    let (mut from, mut chunks) = (extent.address, VecDeque::new());
    let mut next = || {
        if chunks.is_empty() {
            let more =
                sender.export_chunks(extent, from, batch).map_err(|error| error.to_string())?;
            from += more.iter().map(|(_, bytes)| bytes).sum::<u64>();
            chunks.extend(more);
        }
        chunks.pop_front().ok_or_else(|| "no more".to_owned())
    };
    let address = receiver.import_chunks(0, &name(extent), extent.bytes, &mut next)?;
    Ok((address, extent))
}

/// The number of the physical byte at an address.
fn byte_at(gpu: &Gpu, address: u64) -> u64 {
    let Some(Backing { address: start, physical, .. }) = gpu.allocation(address) else {
        panic!("nothing backs {address:#x}")
    };
    physical + (address - start)
}

/// The physical bytes at the start of each page of a range.
fn bytes_of(gpu: &Gpu, address: u64, bytes: u64) -> Vec<u64> {
    (0..bytes).step_by(2 * MIB as usize).map(|at| byte_at(gpu, address + at)).collect()
}

/// Handles and reservations of the driver.
fn counts(gpu: &Gpu) -> (usize, usize) {
    let held = gpu.held();
    (held.mappings, held.handles + held.reservations)
}

#[test]
fn a_receiver_maps_the_very_bytes_of_each_block_while_pages_move() {
    for (conf, seed) in [("", 1), ("slack:0.5%", 2), ("slack:0", 3)] {
        let world = World::new(4 * GIB, conf);
        let sender = &world.rig;
        let receiver = Rig::on(&sender.gpu, "");
        let streams = [DEFAULT, sender.stream(), sender.stream()];
        let mut random = Random(seed);
        let mut blocks = Vec::<(u64, u64)>::new();
        let mut open = Vec::<(u64, u64, u64, Extent)>::new();
        let mut known = HashMap::new();
        for _ in 0..600 {
            match random.below(8) {
                0..4 => {
                    let size = match random.below(4) {
                        0 => 1 + random.below(16 << 10),
                        1 => 1 + random.below(2 * MIB),
                        2 => MIB + random.below(30 * MIB),
                        _ => 30 * MIB + random.below(200 * MIB),
                    };
                    let stream = streams[random.below(3) as usize];
                    if let Some(block) = world.malloc_if_possible(size, stream) {
                        blocks.push((block, size));
                    }
                }
                4..6 if !blocks.is_empty() => {
                    let at = random.below(blocks.len() as u64) as usize;
                    // A block that somebody has open stays.
                    if !open.iter().any(|&(block, ..)| block == blocks[at].0) {
                        world.free(blocks.swap_remove(at).0);
                    }
                }
                6 if !blocks.is_empty() => {
                    let (block, size) = blocks[random.below(blocks.len() as u64) as usize];
                    let batch = 1 + random.below(4) as usize;
                    let (import, extent) =
                        receive(&sender.heap, &receiver.heap, block, batch).unwrap();
                    assert!(extent.address <= block);
                    assert!(block + size <= extent.address + extent.bytes);
                    // Equal extents are the same memory, whenever they are offered.
                    let bytes = bytes_of(&sender.gpu, extent.address, extent.bytes);
                    assert_eq!(*known.entry(extent).or_insert_with(|| bytes.clone()), bytes);
                    open.push((block, size, import, extent));
                }
                7 if !open.is_empty() => {
                    let at = random.below(open.len() as u64) as usize;
                    let (.., import, _) = open.swap_remove(at);
                    assert!(receiver.heap.close_import(import));
                }
                _ => world.launch(streams[random.below(3) as usize], 1),
            }
            for &(block, size, import, extent) in &open {
                let there = import + (block - extent.address);
                assert_eq!(
                    bytes_of(&sender.gpu, there, size),
                    bytes_of(&sender.gpu, block, size),
                    "{block:#x} of {conf}"
                );
            }
        }
        assert!(known.len() > 20, "{} extents are hardly a test", known.len());
        for (.., import, _) in open {
            assert!(receiver.heap.close_import(import));
        }
        assert_eq!(receiver.heap.imports(), (0, 0));
        blocks.into_iter().for_each(|(block, _)| world.free(block));
        world.check_all_comes_back();
        receiver.check();
    }
}

#[test]
fn memory_that_is_open_is_mapped_once_and_until_it_is_closed_as_often() {
    let world = World::new(GIB, "");
    let receiver = Rig::on(&world.rig.gpu, "");
    // Small blocks share a slab, and so an extent.
    let (block, beside) = (world.malloc(1000, DEFAULT), world.malloc(1000, DEFAULT));
    let before = counts(&world.rig.gpu);
    let (first, extent) = receive(&world.rig.heap, &receiver.heap, block, 1).unwrap();
    let during = counts(&world.rig.gpu);
    assert_ne!(before, during);
    assert_eq!(receive(&world.rig.heap, &receiver.heap, beside, 1).unwrap(), (first, extent));
    assert_eq!(counts(&world.rig.gpu), during, "mapped twice");
    assert!(receiver.heap.close_import(first));
    assert_eq!((receiver.heap.imports(), counts(&world.rig.gpu)), ((1, 0), during));
    assert!(receiver.heap.close_import(first));
    assert_eq!((receiver.heap.imports(), counts(&world.rig.gpu)), ((0, 0), before));
    assert!(!receiver.heap.close_import(first), "nothing is open there any more");
    receiver.check();
}

#[test]
fn what_a_receiver_opens_costs_it_no_memory_and_outlives_the_senders_handles() {
    let world = World::new(GIB, "");
    let receiver = Rig::on(&world.rig.gpu, "");
    let block = world.malloc(40 * MIB, DEFAULT);
    let held = world.physical();
    let (import, _) = receive(&world.rig.heap, &receiver.heap, block, 8).unwrap();
    assert_eq!(world.physical(), held);
    assert_eq!(receiver.heap.stats(0).unwrap().reserved, 0);
    // A sender that frees too early takes nothing from the receiver's address space.
    world.free(block);
    world.rig.heap.trim();
    assert!(world.physical() >= 40 * MIB);
    assert!(receiver.heap.close_import(import));
    assert_eq!(world.physical(), 0);
}

#[test]
fn an_extent_is_refused_once_other_chunks_are_mapped_there() {
    let world = World::new(GIB, "");
    let block = world.malloc(40 * MIB, DEFAULT);
    let Ok(Offer::Chunks(extent)) = world.rig.heap.offer(block) else { panic!("no chunks") };
    assert!(world.rig.heap.export_chunks(extent, extent.address, 1).is_ok());
    world.free(block);
    world.rig.heap.trim();
    let outdated = |extent: Extent| {
        matches!(world.rig.heap.export_chunks(extent, extent.address, 1), Err(NotOffered::Outdated))
    };
    assert!(outdated(extent), "nothing is mapped there");
    let again = world.malloc(40 * MIB, DEFAULT);
    let Ok(Offer::Chunks(new)) = world.rig.heap.offer(again) else { panic!("no chunks") };
    assert!(new.newest > extent.newest && outdated(extent));
    for wrong in [
        Extent { bytes: extent.bytes + 2 * MIB, ..new },
        Extent { address: 0, bytes: u64::MAX, newest: 0 },
        Extent { address: u64::MAX, bytes: u64::MAX, newest: 0 },
    ] {
        assert!(outdated(wrong), "{wrong:?}");
    }
}

#[test]
fn what_starts_no_live_block_is_not_offered() {
    for backing in BACKINGS {
        let world = World::new(GIB, backing);
        let (small, large) = (world.malloc(1000, DEFAULT), world.malloc(20 * MIB, DEFAULT));
        for address in [0, 4096, small + 1, small + 512, large + 2 * MIB, u64::MAX] {
            let refused = world.rig.heap.offer(address).unwrap_err();
            assert_eq!(refused, NotOffered::NoBlock(address), "{backing}");
        }
        world.free(large);
        assert_eq!(world.rig.heap.offer(large), Err(NotOffered::NoBlock(large)), "{backing}");
        // Freed, and waiting for a stream.
        let other = world.rig.stream();
        world.launch(other, 10);
        world.record_stream(small, other);
        world.free(small);
        if !backing.contains("passthrough") {
            assert_eq!(world.rig.heap.offer(small), Err(NotOffered::NoBlock(small)), "{backing}");
        }
    }
}

#[test]
fn a_plain_allocation_goes_by_the_drivers_handle_and_a_pools_memory_not_at_all() {
    let offered = |conf: &str, size| {
        let world = World::new(16 * GIB, conf);
        let block = world.malloc(size, DEFAULT);
        (world.rig.heap.offer(block), block, world)
    };
    for conf in ["backing:fixed", "backing:passthrough"] {
        for size in [1000, 20 * MIB] {
            let (offer, block, world) = offered(conf, size);
            let Ok(Offer::Plain(start, handle)) = offer else { panic!("{conf}: {offer:?}") };
            assert!(start <= block && world.rig.gpu.allocation(start).unwrap().address == start);
            let receiver = Rig::on(&world.rig.gpu, "");
            let import = receiver.heap.import_plain(0, handle).unwrap();
            assert_eq!(receiver.heap.import_plain(0, handle).unwrap(), import, "opened twice");
            assert!(receiver.heap.close_import(import) && receiver.heap.close_import(import));
            assert_eq!(receiver.heap.imports(), (0, 0));
        }
    }
    let (offer, ..) = offered("backing:pool,headroom:0", 40 * MIB);
    assert_eq!(offer, Err(NotOffered::InPool));
    assert!(NotOffered::InPool.to_string().contains("backing:fixed"));
}

#[test]
fn nothing_is_lost_when_a_driver_call_of_an_import_fails() {
    for conf in ["", "backing:fixed"] {
        let run = |world: &mut World, _| {
            let heap = &world.rig.heap;
            let Ok(block) = world.try_malloc(30 * MIB, 0, DEFAULT) else { return };
            let import = match heap.offer(block) {
                Ok(Offer::Chunks(_)) => {
                    receive(heap, heap, block, 2).ok().map(|(import, _)| import)
                }
                Ok(Offer::Plain(_, handle)) => heap.import_plain(0, handle).ok(),
                Err(_) => None,
            };
            if let Some(import) = import {
                assert!(heap.close_import(import), "the books have it, whatever the driver says");
            }
            world.free(block);
        };
        let end = |world: &mut World, is_sound: bool| {
            if !is_sound {
                return;
            }
            // A later call gives back what was left.
            world.rig.heap.close_import(0);
            assert_eq!(world.rig.heap.imports(), (0, 0));
            world.check_all_comes_back();
            assert_eq!(world.rig.gpu.held().plain, 0, "a plain allocation is still open");
        };
        flaky::fail_every_call(
            "a block is sent and opened",
            &[ErrorKind::OutOfMemory, ErrorKind::InvalidValue, ErrorKind::DeviceLost],
            || World::new(GIB, conf),
            |world| &world.driver,
            run,
            end,
        );
    }
}

#[test]
fn a_sender_that_breaks_off_leaves_nothing_mapped() {
    let world = World::new(GIB, "slack:0");
    let heap = &world.rig.heap;
    let block = world.malloc(20 * MIB, DEFAULT);
    let Ok(Offer::Chunks(extent)) = heap.offer(block) else { panic!("no chunks") };
    let before = counts(&world.rig.gpu);
    for stops_after in 0..3 {
        let mut chunks = VecDeque::from(
            heap.export_chunks(extent, extent.address, stops_after).unwrap_or_default(),
        );
        let mut next = || chunks.pop_front().ok_or_else(|| "broke off".to_owned());
        let failed = heap.import_chunks(0, b"a", extent.bytes, &mut next).unwrap_err();
        assert_eq!(failed.to_string(), "broke off");
        assert_eq!((heap.imports(), counts(&world.rig.gpu)), ((0, 0), before));
    }
    // Chunks that are not as long as was said.
    let mut chunks = VecDeque::from(heap.export_chunks(extent, extent.address, 1).unwrap());
    let mut next = || chunks.pop_front().ok_or_else(|| "broke off".to_owned());
    let failed = heap.import_chunks(0, b"a", MIB, &mut next).unwrap_err();
    assert!(failed.to_string().contains("lengths") || failed.to_string().contains("refused"));
    assert_eq!((heap.imports(), counts(&world.rig.gpu)), ((0, 0), before));
}

#[test]
fn an_import_is_unmapped_when_the_device_is_done_with_it_and_breaks_no_capture() {
    let world = World::new(GIB, "");
    let receiver = Rig::on(&world.rig.gpu, "");
    let capturing = receiver.stream();
    let block = world.malloc(20 * MIB, DEFAULT);
    let (import, _) = receive(&world.rig.heap, &receiver.heap, block, 8).unwrap();
    // As torch.cuda.graph: the hook, then the capture.
    receiver.heap.begin_allocate_to_pool(0, (0, 1)).unwrap();
    as_program(|| {
        world.rig.gpu.begin_capture(0, capturing.0, CaptureMode::Global, Some(1)).unwrap();
    });
    assert!(receiver.heap.close_import(import));
    assert_eq!(receiver.heap.imports(), (0, 1), "kept while a stream captures");
    as_program(|| world.rig.gpu.end_capture(0, capturing.0)).expect("the capture was broken");
    receiver.heap.end_allocate_to_pool(0, (0, 1)).unwrap();
    // Work runs when the memory is closed: it is waited for.
    let (again, _) = receive(&world.rig.heap, &receiver.heap, block, 8).unwrap();
    assert_eq!(receiver.heap.imports(), (1, 0), "the next import gives back what was left");
    let stream: StreamHandle = receiver.stream();
    as_program(|| world.rig.gpu.launch(0, stream.0, 5, 20_000)).unwrap();
    let done = as_program(|| {
        let event = world.rig.gpu.event_create(0).unwrap();
        world.rig.gpu.event_record(0, event, stream.0).unwrap();
        event
    });
    assert!(receiver.heap.close_import(again));
    assert!(as_program(|| world.rig.gpu.event_query(0, done)).unwrap(), "unmapped under a kernel");
    receiver.check();
}

#[test]
fn a_device_without_virtual_memory_management_cannot_open_chunks() {
    let world = World::new(GIB, "");
    let block = world.malloc(20 * MIB, DEFAULT);
    let mut config = GpuConfig::new(GIB);
    config.devices[0].vmm = false;
    let other = Rig::over(config, "");
    let failed = receive(&world.rig.heap, &other.heap, block, 8).unwrap_err();
    assert!(matches!(failed, NotImported::Driver(_)), "{failed}");
    assert_eq!(other.heap.imports(), (0, 0));
}
