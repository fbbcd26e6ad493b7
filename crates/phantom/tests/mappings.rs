//! Promises of virtual memory management and plain memory.

use gruyere_phantom::error::code;
use gruyere_phantom::{Config, Gpu, Held, Source, StreamKind};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

#[test]
fn memory_lives_until_it_is_released_and_unmapped_everywhere() {
    let gpu = Gpu::new(Config::new(64 * MIB));
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, PAGE).unwrap();
    gpu.map(0, base, PAGE, 0, handle).unwrap();
    gpu.map(0, base + 2 * PAGE, PAGE, 0, handle).unwrap();
    gpu.physical_release(0, handle).unwrap();
    assert_eq!(gpu.books(0).physical, PAGE);
    gpu.unmap(0, base, PAGE).unwrap();
    assert_eq!(gpu.books(0).physical, PAGE, "the alias still stands");
    gpu.unmap(0, base + 2 * PAGE, PAGE).unwrap();
    assert_eq!(gpu.books(0).physical, 0);
    gpu.address_free(0, base, 4 * PAGE).unwrap();
    assert_eq!((gpu.vmm_counts(), gpu.address_books().reserved), ((0, 0), 0));
    assert_eq!(gpu.misuses(), []);
}

#[test]
fn aliases_are_the_same_physical_bytes() {
    let gpu = Gpu::new(Config::new(64 * MIB));
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    gpu.map(0, base, 2 * PAGE, 0, handle).unwrap();
    gpu.map(0, base + 2 * PAGE, 2 * PAGE, 0, handle).unwrap();
    let one = gpu.backing(base + MIB, MIB)[0];
    let two = gpu.backing(base + 2 * PAGE + MIB, MIB)[0];
    assert_eq!((one.physical, one.offset), (two.physical, MIB));
    assert_eq!((one.source, two.offset), (Source::Mapping(handle), MIB));
}

#[test]
fn access_and_unmap_cover_several_mappings() {
    let gpu = Gpu::new(Config::devices(2, 64 * MIB));
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    for i in 0..3 {
        let handle = gpu.physical_create(0, PAGE).unwrap();
        gpu.map(0, base + i * PAGE, PAGE, 0, handle).unwrap();
    }
    gpu.set_access(0, base, 3 * PAGE, &[0, 1]).unwrap();
    assert!(gpu.backing(base, 3 * PAGE).iter().all(|piece| piece.access == 3));
    gpu.unmap(0, base, 2 * PAGE).unwrap();
    assert!(!gpu.is_backed(base, PAGE) && gpu.is_backed(base + 2 * PAGE, PAGE));
}

#[test]
fn no_more_than_the_capacity_less_what_others_took() {
    let gpu = Gpu::new(Config::new(8 * MIB));
    gpu.set_taken(0, 3 * MIB);
    let plain = gpu.alloc(0, 1).unwrap();
    gpu.physical_create(0, PAGE).unwrap();
    assert_eq!(gpu.memory_info(0), Ok((MIB, 8 * MIB)));
    assert_eq!(gpu.physical_create(0, PAGE).unwrap_err().code, code::OUT_OF_MEMORY);
    assert_eq!(gpu.alloc(0, 1).unwrap_err().code, code::OUT_OF_MEMORY);
    assert_eq!(gpu.alloc(0, u64::MAX).unwrap_err().code, code::OUT_OF_MEMORY);
    gpu.free(0, plain).unwrap();
    gpu.physical_create(0, PAGE).unwrap();
    assert_eq!(gpu.books(0).physical_peak, 2 * PAGE);
    assert_eq!(gpu.misuses(), [], "out of memory is no misuse");
}

#[test]
fn address_space_runs_out_as_a_false_out_of_memory() {
    let gpu = Gpu::new(Config { address_bits: 23, ..Config::new(64 * MIB) });
    let base = gpu.address_reserve(0, 6 * MIB, 0).unwrap();
    assert_eq!(gpu.address_reserve(0, 4 * MIB, 0).unwrap_err().code, code::OUT_OF_MEMORY);
    gpu.address_free(0, base, 6 * MIB).unwrap();
    assert_eq!(gpu.address_reserve(0, 4 * MIB, 0), Ok(base), "holes are reused");
    assert_eq!(gpu.address_books().peak, 6 * MIB);
}

#[test]
fn a_reservation_is_aligned_as_was_asked_and_no_better_where_the_default_is_less() {
    let gpu = Gpu::new(Config { default_alignment: 64 << 10, ..Config::new(64 * MIB) });
    let by_default = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let small = gpu.address_reserve(0, 4 * PAGE, 512 << 10).unwrap();
    let large = gpu.address_reserve(0, 4 * PAGE, 4 * PAGE).unwrap();
    assert_eq!([by_default % PAGE, small % PAGE, large % (4 * PAGE)], [64 << 10, 512 << 10, 0]);
    assert_eq!(gpu.address_books().reserved, 12 * PAGE, "what lies before them is nobody's");
    // Mappings begin at whole granules.
    let handle = gpu.physical_create(0, PAGE).unwrap();
    assert_eq!(gpu.map(0, by_default, PAGE, 0, handle).unwrap_err().code, code::INVALID_VALUE);
    for address in [by_default, small, large] {
        gpu.address_free(0, address, 4 * PAGE).unwrap();
    }
    assert_eq!(gpu.address_books().reserved, 0);
}

#[test]
fn physical_memory_and_mappings_are_whole_units_of_the_granularity() {
    for granularity in [64 << 10, 4 * MIB] {
        let mut config = Config::new(64 * MIB);
        config.devices[0].granularity = granularity;
        let gpu = Gpu::new(config);
        let base = gpu.address_reserve(0, 4 * granularity, granularity).unwrap();
        let handle = gpu.physical_create(0, 3 * granularity).unwrap();
        gpu.map(0, base + granularity, 3 * granularity, 0, handle).unwrap();
        gpu.set_access(0, base + granularity, 3 * granularity, &[0]).unwrap();
        assert_eq!(gpu.misuses(), []);
        assert_eq!(gpu.physical_create(0, granularity / 2).unwrap_err().code, code::INVALID_VALUE);
        assert_eq!(
            gpu.address_reserve(0, granularity / 2, 0).unwrap_err().code,
            code::INVALID_VALUE
        );
        gpu.unmap(0, base + granularity, 3 * granularity).unwrap();
    }
}

#[test]
fn each_device_has_its_own_books() {
    let gpu = Gpu::new(Config::devices(2, 8 * MIB));
    gpu.physical_create(1, 3 * PAGE).unwrap();
    assert_eq!((gpu.books(0).physical, gpu.books(1).physical), (0, 3 * PAGE));
    assert_eq!(gpu.can_access_peer(0, 1), Ok(true));
    assert_eq!(gpu.can_access_peer(0, 0), Ok(false));
}

#[test]
fn a_device_without_the_feature_says_so() {
    let mut config = Config::new(64 * MIB);
    config.devices[0].vmm = false;
    config.devices[0].pools = false;
    let gpu = Gpu::new(config);
    assert_eq!(gpu.physical_create(0, PAGE).unwrap_err().code, code::NOT_SUPPORTED);
    assert_eq!(gpu.address_reserve(0, PAGE, 0).unwrap_err().code, code::NOT_SUPPORTED);
    assert_eq!(gpu.pool_create(0, 0).unwrap_err().code, code::NOT_SUPPORTED);
    gpu.alloc(0, PAGE).unwrap();
}

#[test]
fn what_is_held_is_counted() {
    let gpu = Gpu::new(Config::new(256 * MIB));
    let pool = gpu.pool_create(0, 0).unwrap();
    let span = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    let base = gpu.address_reserve(0, PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, PAGE).unwrap();
    gpu.map(0, base, PAGE, 0, handle).unwrap();
    let plain = gpu.alloc(0, MIB).unwrap();
    let event = gpu.event_create(0).unwrap();
    let stream = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    let one_of_each = Held {
        pools: 1,
        pool_allocations: 1,
        handles: 1,
        mappings: 1,
        reservations: 1,
        plain: 1,
        events: 1,
        streams: 1,
    };
    assert_eq!(gpu.held(), one_of_each);
    assert_eq!(
        gpu.all_backings().iter().map(|b| b.address).max(),
        [span, base, plain].into_iter().max()
    );
    gpu.stream_destroy(0, stream).unwrap();
    gpu.event_destroy(0, event).unwrap();
    gpu.free(0, plain).unwrap();
    gpu.unmap(0, base, PAGE).unwrap();
    gpu.physical_release(0, handle).unwrap();
    gpu.address_free(0, base, PAGE).unwrap();
    gpu.pool_free(0, span, 0).unwrap();
    gpu.pool_destroy(0, pool).unwrap();
    assert_eq!(gpu.held(), Held::default());
}

#[test]
fn memory_of_another_process_takes_none_of_the_device_here() {
    let gpu = Gpu::new(Config::new(PAGE));
    gpu.physical_create(0, PAGE).unwrap();
    let other = gpu.physical_import(0, 3 * PAGE).unwrap();
    assert_eq!((gpu.books(0).physical, gpu.physical_bytes(other)), (PAGE, Some(3 * PAGE)));
    let address = gpu.address_reserve(0, 3 * PAGE, 0).unwrap();
    gpu.map(0, address, 3 * PAGE, 0, other).unwrap();
    gpu.physical_release(0, other).unwrap();
    gpu.unmap(0, address, 3 * PAGE).unwrap();
    assert_eq!((gpu.books(0).physical, gpu.physical_bytes(other)), (PAGE, None));
    assert_eq!(gpu.misuses(), []);
}

#[test]
fn a_handle_that_another_allocator_imports_lives_until_both_have_released_it() {
    let gpu = Gpu::new(Config::new(PAGE));
    let handle = gpu.physical_create(0, PAGE).unwrap();
    gpu.physical_retain(0, handle).unwrap();
    gpu.physical_release(0, handle).unwrap();
    assert_eq!((gpu.books(0).physical, gpu.vmm_counts().0), (PAGE, 1));
    gpu.physical_release(0, handle).unwrap();
    assert_eq!((gpu.books(0).physical, gpu.vmm_counts().0), (0, 0));
    assert_eq!(gpu.misuses(), []);
    assert!(gpu.physical_retain(0, handle).is_err(), "it is gone");
}
