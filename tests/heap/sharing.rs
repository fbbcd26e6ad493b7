//! Memory that processes share: what a receiver maps is the sender's block, for as long as it
//! lives, and nothing is lost whatever fails. Sender and receiver are two heaps on one GPU.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Random, Rig};
use crate::flaky;
use crate::world::World;
use gruyere::driver::{ErrorKind, StreamHandle};
use gruyere::heap::{Export, Extent, Heap, Lifetime, NotExported, NotImported};
use gruyere::record::Reader;
use gruyere_phantom::{
    Backing, CallKind, CaptureMode, Config as GpuConfig, Gpu, Injection, as_program,
};
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
    let extent = match sender.export(block) {
        Ok(Export::Chunks(extent)) => extent,
        other => return Err(NotImported::Sender(format!("{other:?}"))),
    };
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
                    // Equal extents are the same memory, whenever they are exported.
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
    let Ok(Export::Chunks(extent)) = world.rig.heap.export(block) else { panic!("no chunks") };
    assert!(world.rig.heap.export_chunks(extent, extent.address, 1).is_ok());
    world.free(block);
    world.rig.heap.trim();
    let outdated = |extent: Extent| {
        matches!(
            world.rig.heap.export_chunks(extent, extent.address, 1),
            Err(NotExported::Outdated)
        )
    };
    assert!(outdated(extent), "nothing is mapped there");
    let again = world.malloc(40 * MIB, DEFAULT);
    let Ok(Export::Chunks(new)) = world.rig.heap.export(again) else { panic!("no chunks") };
    assert!(new.newest > extent.newest && outdated(extent));
    for wrong in [
        Extent { bytes: extent.bytes + 2 * MIB, ..new },
        Extent { device: 1, ..new },
        Extent { device: u32::MAX, ..new },
        Extent { address: 0, bytes: u64::MAX, newest: 0, ..new },
        Extent { address: u64::MAX, bytes: u64::MAX, newest: 0, ..new },
    ] {
        assert!(outdated(wrong), "{wrong:?}");
    }
}

#[test]
fn what_starts_no_live_block_is_not_exported() {
    for backing in BACKINGS {
        let world = World::new(GIB, backing);
        let (small, large) = (world.malloc(1000, DEFAULT), world.malloc(20 * MIB, DEFAULT));
        for address in [0, 4096, small + 1, small + 512, large + 2 * MIB, u64::MAX] {
            let refused = world.rig.heap.export(address).unwrap_err();
            assert_eq!(refused, NotExported::NoBlock(address), "{backing}");
        }
        world.free(large);
        assert_eq!(world.rig.heap.export(large), Err(NotExported::NoBlock(large)), "{backing}");
        // Freed, and waiting for a stream.
        let other = world.rig.stream();
        world.launch(other, 10);
        world.record_stream(small, other);
        world.free(small);
        if !backing.contains("passthrough") {
            assert_eq!(world.rig.heap.export(small), Err(NotExported::NoBlock(small)), "{backing}");
        }
    }
}

#[test]
fn a_plain_allocation_goes_by_the_drivers_handle_and_a_pools_memory_not_at_all() {
    let exported = |conf: &str, size| {
        let world = World::new(16 * GIB, conf);
        let block = world.malloc(size, DEFAULT);
        (world.rig.heap.export(block), block, world)
    };
    for conf in ["backing:fixed", "backing:passthrough"] {
        for size in [1000, 20 * MIB] {
            let (export, block, world) = exported(conf, size);
            let Ok(Export::Plain(start, handle)) = export else { panic!("{conf}: {export:?}") };
            assert!(start <= block && world.rig.gpu.allocation(start).unwrap().address == start);
            let receiver = Rig::on(&world.rig.gpu, "");
            let import = receiver.heap.import_plain(0, handle).unwrap();
            assert_eq!(receiver.heap.import_plain(0, handle).unwrap(), import, "opened twice");
            assert!(receiver.heap.close_import(import) && receiver.heap.close_import(import));
            assert_eq!(receiver.heap.imports(), (0, 0));
        }
    }
    let (export, ..) = exported("backing:pool,headroom:0", 40 * MIB);
    assert_eq!(export, Err(NotExported::InPool));
    assert!(NotExported::InPool.to_string().contains("backing:fixed"));
}

#[test]
fn nothing_is_lost_when_a_driver_call_of_an_import_fails() {
    for conf in ["", "backing:fixed"] {
        let run = |world: &mut World, _| {
            let heap = &world.rig.heap;
            let Ok(block) = world.try_malloc(30 * MIB, 0, DEFAULT) else { return };
            let import = match heap.export(block) {
                Ok(Export::Chunks(_)) => {
                    receive(heap, heap, block, 2).ok().map(|(import, _)| import)
                }
                Ok(Export::Plain(_, handle)) => heap.import_plain(0, handle).ok(),
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
    let Ok(Export::Chunks(extent)) = heap.export(block) else { panic!("no chunks") };
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
    for length in [0, 4 * MIB] {
        let mut next = || {
            let (file, _) = heap.export_chunks(extent, extent.address, 1).unwrap().remove(0);
            Ok((file, length))
        };
        let failed = heap.import_chunks(0, b"a", 2 * MIB, &mut next).unwrap_err();
        assert!(failed.to_string().contains("other lengths"), "{failed}");
        assert_eq!((heap.imports(), counts(&world.rig.gpu)), ((0, 0), before));
    }
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
    // What is still whole is opened again.
    let (again, _) = receive(&world.rig.heap, &receiver.heap, block, 8).unwrap();
    assert_eq!((again, receiver.heap.imports()), (import, (1, 0)));
    // Work runs when the memory is closed: it is waited for.
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
fn what_a_capture_kept_open_goes_at_its_end_at_steps_and_with_the_cache() {
    for way in 0..3 {
        let world = World::new(GIB, "");
        let receiver = Rig::on(&world.rig.gpu, "");
        let block = world.malloc(20 * MIB, DEFAULT);
        let before = counts(&world.rig.gpu);
        let (import, _) = receive(&world.rig.heap, &receiver.heap, block, 8).unwrap();
        receiver.heap.begin_allocate_to_pool(0, (0, 1)).unwrap();
        assert!(receiver.heap.close_import(import));
        receiver.heap.mark_step();
        receiver.heap.trim();
        assert_eq!(receiver.heap.imports(), (0, 1), "not while it is open");
        if way == 0 {
            receiver.heap.end_allocate_to_pool(0, (0, 1)).unwrap();
        } else {
            // Its driver refuses once, at the end of the capture.
            world.rig.gpu.inject(Injection {
                kind: Some(CallKind::Unmap),
                nth: 1,
                code: 1,
                from_then_on: false,
            });
            receiver.heap.end_allocate_to_pool(0, (0, 1)).unwrap();
            assert_eq!(receiver.heap.imports(), (0, 1));
            if way == 1 {
                receiver.heap.mark_step();
            } else {
                receiver.heap.trim();
            }
        }
        assert_eq!((receiver.heap.imports(), counts(&world.rig.gpu)), ((0, 0), before), "{way}");
    }
}

#[test]
fn memory_that_the_driver_opens_no_file_for_is_refused_to_the_sender() {
    let world = World::new(GIB, "");
    let block = world.malloc(20 * MIB, DEFAULT);
    world.driver.set(flaky::Plan::Nth(1, ErrorKind::InvalidValue));
    let refused = world.rig.heap.export(block).unwrap_err();
    assert!(matches!(refused, NotExported::NoFiles(_)), "{refused:?}");
    assert!(refused.to_string().contains("handle_type:none"), "{refused}");
    world.driver.set(flaky::Plan::Sound);
    assert!(world.rig.heap.export(block).is_ok());
}

#[test]
fn a_device_used_later_reaches_what_is_open_and_equal_names_of_two_devices_are_apart() {
    let mut config = GpuConfig::new(GIB);
    config.devices.push(config.devices[0].clone());
    let rig = Rig::over(config, "");
    rig.heap.announce_hooks(3);
    let block = rig.malloc(20 * MIB, DEFAULT);
    let (import, extent) = receive(&rig.heap, &rig.heap, block, 8).unwrap();
    let reached = |address| rig.gpu.allocation(address).unwrap().access;
    assert_eq!(reached(import), 0b01);
    rig.heap.malloc(MIB, 1, DEFAULT).unwrap();
    assert_eq!(reached(import), 0b11, "the second device came later");
    // Imported for the second device, at an address of its own; the first reaches it too.
    let mut next = {
        let mut from = extent.address;
        let heap = &rig.heap;
        move || {
            let chunk = heap.export_chunks(extent, from, 1).unwrap().remove(0);
            from += chunk.1;
            Ok(chunk)
        }
    };
    let other = rig.heap.import_chunks(1, &name(extent), extent.bytes, &mut next).unwrap();
    assert_ne!(other, import);
    assert_eq!((reached(other), rig.heap.imports()), (0b11, (2, 0)));
    assert!(rig.heap.close_import(import) && rig.heap.close_import(other));
    assert_eq!(rig.heap.imports(), (0, 0));
    rig.check();
}

#[test]
fn many_threads_open_and_close_the_same_memory_and_none_is_left() {
    let world = World::new(GIB, "");
    let receiver = Rig::on(&world.rig.gpu, "");
    let blocks: Vec<u64> = (0..3).map(|at| world.malloc((at + 1) * 5 * MIB, DEFAULT)).collect();
    let before = counts(&world.rig.gpu);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (blocks, sender, receiver) = (&blocks, &world.rig.heap, &receiver);
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..200 {
                    let block = blocks[random.below(3) as usize];
                    let (import, extent) = receive(sender, &receiver.heap, block, 1).unwrap();
                    let there = import + (block - extent.address);
                    assert_eq!(byte_at(&receiver.gpu, there), byte_at(&receiver.gpu, block));
                    assert!(receiver.heap.close_import(import));
                }
            });
        }
    });
    receiver.heap.trim();
    assert_eq!((receiver.heap.imports(), counts(&world.rig.gpu)), ((0, 0), before));
    receiver.check();
}

#[test]
fn a_close_goes_on_while_a_sender_is_slow() {
    let world = World::new(GIB, "");
    let heap = &world.rig.heap;
    let block = world.malloc(20 * MIB, DEFAULT);
    let (import, extent) = receive(heap, heap, block, 8).unwrap();
    let mut next = || {
        assert!(heap.close_import(import), "the sender of another tensor has not answered yet");
        Err("slow".to_owned())
    };
    heap.import_chunks(0, b"slow", extent.bytes, &mut next).unwrap_err();
    assert_eq!(heap.imports(), (0, 0));
}

#[test]
fn a_device_without_virtual_memory_management_cannot_open_chunks() {
    let world = World::new(GIB, "");
    let block = world.malloc(20 * MIB, DEFAULT);
    let mut config = GpuConfig::new(GIB);
    config.devices[0].vmm = false;
    let other = Rig::over(config, "");
    let failed = receive(&world.rig.heap, &other.heap, block, 8).unwrap_err();
    assert!(matches!(failed, NotImported::Driver(0, _)), "{failed}");
    assert_eq!(other.heap.imports(), (0, 0));
}

#[test]
fn the_record_marks_a_block_that_was_sent_until_its_end() {
    for conf in BACKINGS {
        let rig = Rig::bare(2 * GIB, &format!("record:on,{conf}"));
        let sent = || {
            let reader = Reader::own(rig.heap.record()).unwrap();
            let entries = reader.blocks().entries.into_iter();
            entries
                .filter(|(block, _)| block.is_sent)
                .map(|(block, _)| block.address)
                .collect::<Vec<_>>()
        };
        for size in [700, 100 << 10, 40 * MIB] {
            let (block, other) = (rig.malloc(size, DEFAULT), rig.malloc(size, DEFAULT));
            if rig.heap.export(block).is_err() {
                assert_eq!(sent(), [0; 0], "{conf}: what was refused was not sent");
                continue;
            }
            assert_eq!(sent(), [block], "{conf}, {size}");
            // A lifetime's change keeps it.
            assert!(conf == "backing:passthrough" || rig.heap.tag(block, Lifetime::Persistent));
            assert_eq!(sent(), [block], "{conf}, {size}");
            assert!(rig.heap.free(block));
            // The next block is often at the same address.
            let next = rig.malloc(size, DEFAULT);
            assert_eq!(sent(), [0; 0], "{conf}, {size}");
            assert!(rig.heap.free(next));
            assert!(rig.heap.free(other));
        }
    }
}
