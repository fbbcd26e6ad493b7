//! The heap's promises to its callers, one test each.

use crate::common::{BACKINGS, DEFAULT, GIB, MIB, Rig};
use gruyere::driver::StreamHandle;
use gruyere::heap::{Error, Lifetime, lifetime};
use gruyere_phantom::{CallKind, Caller, Config as GpuConfig, DeviceConfig, as_program};

/// Sizes around every rounding of the heap.
const SIZES: [u64; 14] = [
    1,
    511,
    512,
    513,
    4096,
    8193,
    100_000,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    10 * MIB + 7,
    33 * MIB,
    200 * MIB,
];

#[test]
fn malloc_gives_aligned_backed_memory_of_every_size_on_every_backing() {
    for backing in BACKINGS {
        let rig = Rig::new(backing);
        for size in SIZES {
            let address = rig.malloc(size, DEFAULT);
            assert_eq!(address % 512, 0, "{backing} {size}");
            assert!(rig.gpu.is_backed(address, size), "{backing} {size}");
            assert!(rig.heap.free(address));
        }
        rig.check();
    }
}

#[test]
fn size_zero_is_null_and_null_may_be_freed() {
    let rig = Rig::new("");
    assert_eq!(rig.malloc(0, DEFAULT), 0);
    assert!(rig.heap.free(0));
    assert_eq!(rig.heap.stats(0).unwrap().bad_frees, 0);
}

#[test]
fn freeing_twice_or_a_foreign_pointer_is_counted_and_harmless() {
    for backing in BACKINGS {
        let rig = Rig::new(backing);
        let (small, large) = (rig.malloc(1000, DEFAULT), rig.malloc(5 * MIB, DEFAULT));
        for address in [small + 1, small + 512, large + 512, 0xdead_0000, u64::MAX, 1] {
            assert!(!rig.heap.free(address), "{backing} {address:#x}");
        }
        assert!(rig.heap.free(small) && rig.heap.free(large));
        assert!(!rig.heap.free(small) && !rig.heap.free(large));
        assert_eq!(rig.heap.stats(0).unwrap().bad_frees, 8);
        rig.check();
        assert_ne!(rig.malloc(1000, DEFAULT), 0);
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let rig = Rig::new("");
    for device in [-1, 1, i64::MAX] {
        let error = rig.heap.malloc(1, device, DEFAULT).unwrap_err();
        assert!(error.to_string().contains(&format!("no device {device}")), "{error}");
    }
}

#[test]
fn absurd_sizes_are_out_of_memory_not_an_overflow() {
    for backing in BACKINGS {
        let rig = Rig::new(backing);
        for size in [u64::MAX, i64::MAX as u64, 1 << 48, (1 << 47) - 1] {
            assert!(
                matches!(rig.heap.malloc(size, 0, DEFAULT), Err(Error::OutOfMemory(_))),
                "{backing} {size}"
            );
        }
        rig.check();
    }
}

#[test]
fn live_counts_blocks_rounded_up_to_512_bytes_and_keeps_the_peak() {
    let rig = Rig::new("");
    let blocks: Vec<u64> = [1, 513, MIB, 3 * MIB + 1].map(|size| rig.malloc(size, DEFAULT)).into();
    let expected = 512 + 1024 + MIB + 3 * MIB + 512;
    assert_eq!(rig.heap.stats(0).unwrap().live, expected);
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    let stats = rig.heap.stats(0).unwrap();
    assert_eq!((stats.live, stats.live_peak), (0, expected));
}

#[test]
fn the_steady_state_makes_no_driver_call() {
    let rig = Rig::new("backing:pool");
    let cycle = || {
        let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
        blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    };
    cycle();
    let before = rig.gpu.counts(Caller::Allocator);
    (0..100).for_each(|_| cycle());
    assert_eq!(rig.gpu.counts(Caller::Allocator), before);
}

#[test]
fn after_a_request_for_most_of_the_device_a_small_one_takes_little_more() {
    // As an inference engine's cache.
    let rig = Rig::bare(16 * GIB, "");
    rig.malloc(14 * GIB, DEFAULT);
    let before = rig.gpu.books(0).physical;
    rig.malloc(20 * MIB, rig.stream());
    assert!(rig.gpu.books(0).physical - before <= 48 * MIB);
}

#[test]
fn empty_cache_gives_everything_back() {
    for backing in ["backing:stitch", "backing:pool", "backing:fixed"] {
        let rig = Rig::new(backing);
        let blocks: Vec<u64> = SIZES.iter().map(|&size| rig.malloc(size, DEFAULT)).collect();
        assert!(rig.gpu.books(0).physical > 0);
        blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
        rig.heap.trim();
        rig.check();
        assert_eq!(rig.heap.stats(0).unwrap().reserved, 0, "{backing}");
        assert_eq!(rig.gpu.books(0).physical, 0, "{backing}");
    }
}

#[test]
fn lifetimes_do_not_share_pages() {
    let rig = Rig::new("");
    let mut pages = std::collections::HashMap::new();
    for _ in 0..64 {
        for tag in Lifetime::ALL {
            assert!(lifetime::push(tag));
            for size in [512, 70_000, 3 * MIB / 2] {
                let address = rig.malloc(size, DEFAULT);
                for page in address / (2 * MIB)..=(address + size - 1) / (2 * MIB) {
                    assert_eq!(*pages.entry(page).or_insert(tag), tag);
                }
            }
            assert!(lifetime::pop());
        }
    }
    rig.check();
}

#[test]
fn a_fraction_of_the_memory_is_enforced_and_may_be_lifted() {
    let rig = Rig::new("");
    rig.heap.set_memory_fraction(0.25, 0).unwrap();
    let first = rig.malloc(3 * GIB, DEFAULT);
    let Err(Error::OutOfMemory(report)) = rig.heap.malloc(2 * GIB, 0, DEFAULT) else {
        panic!("served over the fraction")
    };
    assert!(report.to_string().contains("raise `limit`"), "{report}");
    rig.heap.set_memory_fraction(1.0, 0).unwrap();
    let second = rig.malloc(2 * GIB, DEFAULT);
    assert!(rig.heap.free(first) && rig.heap.free(second));
}

#[test]
fn out_of_memory_names_the_cause_in_bytes_and_the_program_goes_on() {
    for backing in BACKINGS {
        let rig = Rig::bare(GIB, &format!("{backing},headroom:0"));
        rig.heap.announce_hooks(3);
        let held = rig.malloc(600 * MIB, DEFAULT);
        let Err(Error::OutOfMemory(report)) = rig.heap.malloc(600 * MIB, 0, DEFAULT) else {
            panic!("served twice over")
        };
        assert_eq!((report.asked, report.live, report.total), (600 * MIB, 600 * MIB, GIB));
        assert!(
            report
                .to_string()
                .starts_with("CUDA out of memory. Tried to allocate 600.00 MiB. GPU 0 has")
        );
        rig.check();
        assert!(rig.heap.free(held));
        let again = rig.malloc(900 * MIB, DEFAULT);
        assert!(rig.heap.free(again));
        rig.check();
    }
}

#[test]
fn what_lies_free_in_other_shapes_is_given_back_before_memory_runs_out() {
    let rig = Rig::bare(GIB, "headroom:0");
    rig.heap.announce_hooks(3);
    let small: Vec<u64> = (0..600).map(|_| rig.malloc(MIB, DEFAULT)).collect();
    small.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    let persistent = lifetime::push(Lifetime::Persistent);
    let large = rig.malloc(900 * MIB, DEFAULT);
    assert!(persistent && lifetime::pop());
    assert!(rig.heap.free(large));
    rig.check();
}

#[test]
fn headroom_is_left_alone_until_there_is_no_other_way() {
    let rig = Rig::bare(GIB, "headroom:256MiB");
    rig.heap.announce_hooks(3);
    let block = rig.malloc(700 * MIB, DEFAULT);
    assert_eq!(rig.heap.stats(0).unwrap().retries, 0);
    let into_headroom = rig.malloc(200 * MIB, DEFAULT);
    assert_eq!(rig.heap.stats(0).unwrap().retries, 1);
    assert!(rig.heap.free(block) && rig.heap.free(into_headroom));
}

#[test]
fn devices_keep_their_memory_apart_and_reach_each_others() {
    let rig = Rig::over(GpuConfig::devices(3, 4 * GIB), "");
    rig.heap.announce_hooks(3);
    let blocks: Vec<u64> =
        (0..3).map(|device| rig.heap.malloc(5 * MIB, device, DEFAULT).unwrap()).collect();
    for (device, &address) in blocks.iter().enumerate() {
        assert_eq!(rig.gpu.allocation(address).unwrap().device, device as u32);
        assert_eq!(rig.heap.stats(device as i64).unwrap().live, 5 * MIB);
    }
    blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    rig.check();
}

#[test]
fn a_device_without_pools_is_served_by_plain_allocations() {
    let mut config = GpuConfig::new(4 * GIB);
    config.devices[0].pools = false;
    for conf in ["backing:auto", "backing:pool"] {
        let rig = Rig::over(config.clone(), conf);
        rig.heap.announce_hooks(3);
        SIZES
            .map(|size| rig.malloc(size, DEFAULT))
            .into_iter()
            .for_each(|address| assert!(rig.heap.free(address)));
        rig.check();
    }
}

#[test]
fn the_base_of_an_address_is_found_inside_its_span() {
    for backing in BACKINGS {
        let rig = Rig::new(backing);
        let address = rig.malloc(5 * MIB, DEFAULT);
        let (base, bytes) = rig.heap.base_of(address + 4 * MIB).unwrap();
        assert!(base <= address && base + bytes >= address + 5 * MIB);
        assert_eq!(rig.heap.base_of(0xdead_0000), None);
    }
}

#[test]
fn threads_may_allocate_and_free_each_others_blocks() {
    let rig = Rig::new("record:on");
    let streams: Vec<StreamHandle> = (0..4).map(|_| rig.stream()).collect();
    let (sender, receiver) = std::sync::mpsc::channel::<u64>();
    let receiver = std::sync::Mutex::new(receiver);
    std::thread::scope(|scope| {
        for (seed, &stream) in streams.iter().enumerate() {
            let (sender, receiver, rig) = (sender.clone(), &receiver, &rig);
            scope.spawn(move || {
                let mut random = seed as u64 + 1;
                for _ in 0..5000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let size = 1 + (random >> 33) % (1 << (9 + (random >> 20) % 13));
                    sender.send(rig.malloc(size, stream)).unwrap();
                    let received = receiver.lock().unwrap().try_recv();
                    if let Ok(address) = received {
                        assert!(rig.heap.free(address));
                    }
                }
            });
        }
    });
    drop(sender);
    receiver.lock().unwrap().try_iter().for_each(|address| assert!(rig.heap.free(address)));
    assert_eq!(rig.heap.stats(0).unwrap().live, 0);
    rig.check();
}

#[test]
fn host_memory_does_not_grow_with_the_number_of_operations() {
    // Other tests of this program allocate in parallel.
    if !crate::alone("promises::host_memory_does_not_grow_with_the_number_of_operations") {
        return;
    }
    let rig = Rig::new("record:on");
    let streams = [DEFAULT, rig.stream()];
    let mut random = 1u64;
    let mut work = |operations: u32| {
        let mut live = Vec::new();
        for _ in 0..operations {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let size = 1 + (random >> 33) % (1 << (9 + (random >> 20) % 13));
            let address = rig.malloc(size, streams[(random >> 60) as usize % 2]);
            if random >> 40 & 7 == 0 {
                rig.heap.record_stream(address, streams[(random >> 59) as usize % 2]);
            }
            live.push(address);
            if live.len() > 500 {
                let at = (random >> 30) as usize % live.len();
                assert!(rig.heap.free(live.swap_remove(at)));
            }
        }
        live.into_iter().for_each(|address| assert!(rig.heap.free(address)));
    };
    work(300_000);
    let before = resident();
    work(1_500_000);
    let grown = resident().saturating_sub(before);
    assert!(grown < 4 * MIB, "the host footprint grew by {grown} B");
}

/// Resident bytes of this process, shared memory included.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn poison_fills_what_is_handed_out_and_what_comes_back() {
    let rig = Rig::new("debug:poison");
    let count = || rig.gpu.counts(Caller::Allocator).of(CallKind::Memset);
    let address = rig.malloc(5 * MIB, DEFAULT);
    assert_eq!(count(), 1);
    assert!(rig.heap.free(address));
    assert_eq!(count(), 2);
}

#[test]
fn sync_waits_for_the_device_at_every_call() {
    let rig = Rig::new("debug:sync");
    let address = rig.malloc(1000, DEFAULT);
    as_program(|| rig.gpu.launch(0, 0, 1, 1_000_000)).unwrap();
    let before = rig.gpu.host_time();
    assert!(rig.heap.free(address));
    assert!(rig.gpu.host_time().now >= before.now + 1_000_000);
}

#[test]
fn of_a_device_that_shares_the_hosts_memory_no_more_is_held_than_the_host_had() {
    let host = GpuConfig {
        devices: vec![DeviceConfig { host_memory: Some(GIB), ..DeviceConfig::new(4 * GIB) }],
        ..GpuConfig::new(4 * GIB)
    };
    for backing in BACKINGS {
        let rig = Rig::over(host.clone(), backing);
        let most = rig.malloc(GIB - 64 * MIB, DEFAULT);
        let Err(Error::OutOfMemory(report)) = rig.heap.malloc(512 * MIB, 0, DEFAULT) else {
            panic!("{backing}: the host's memory is taken");
        };
        assert_eq!(report.limit, GIB, "{backing}");
        assert!(rig.heap.free(most));
        // A setting overrides that.
        let rig = Rig::over(host.clone(), &format!("{backing},limit:100%"));
        let more = rig.malloc(2 * GIB, DEFAULT);
        assert!(rig.heap.free(more), "{backing}");
    }
}
