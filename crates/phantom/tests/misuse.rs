//! Every misuse of the driver is refused with its code, noted, and changes nothing.

use gruyere_phantom::error::code;
use gruyere_phantom::{Config, Gpu, PoolAttribute, SimResult};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

fn gpu() -> Gpu {
    Gpu::new(Config::devices(2, 256 * MIB))
}

/// The call was refused as an invalid value, and the log says why.
#[track_caller]
fn assert_refused<T: std::fmt::Debug>(gpu: &Gpu, before: usize, result: SimResult<T>, why: &str) {
    assert_eq!(result.unwrap_err().code, code::INVALID_VALUE);
    let misuses = gpu.misuses();
    assert_eq!(misuses.len(), before + 1, "{misuses:?}");
    assert!(misuses[before].to_string().contains(why), "{}", misuses[before]);
}

/// Two mapped pages at the start of a reservation of eight.
fn two_mapped(gpu: &Gpu) -> (u64, [u64; 2]) {
    let base = gpu.address_reserve(0, 8 * PAGE, 0).unwrap();
    let handles = [0, 1].map(|i| {
        let handle = gpu.physical_create(0, PAGE).unwrap();
        gpu.map(0, base + i * PAGE, PAGE, 0, handle).unwrap();
        handle
    });
    (base, handles)
}

#[test]
fn double_map() {
    let gpu = gpu();
    let (base, _) = two_mapped(&gpu);
    let handle = gpu.physical_create(0, PAGE).unwrap();
    assert_refused(&gpu, 0, gpu.map(0, base + PAGE, PAGE, 0, handle), "over a mapping");
    gpu.map(0, base + 2 * PAGE, PAGE, 0, handle).unwrap();
}

#[test]
fn map_out_of_range() {
    let gpu = gpu();
    let base = gpu.address_reserve(0, 2 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    assert_refused(
        &gpu,
        0,
        gpu.map(0, base + PAGE, 2 * PAGE, 0, handle),
        "outside of a reservation",
    );
    assert_refused(
        &gpu,
        1,
        gpu.map(0, base - PAGE, 2 * PAGE, 0, handle),
        "outside of a reservation",
    );
    assert_refused(&gpu, 2, gpu.map(0, u64::MAX - PAGE + 1, 2 * PAGE, 0, handle), "whole granules");
}

#[test]
fn map_across_two_reservations() {
    let gpu = gpu();
    let a = gpu.address_reserve(0, PAGE, 0).unwrap();
    let b = gpu.address_reserve(0, PAGE, 0).unwrap();
    assert_eq!(b, a + PAGE, "the two are neighbours");
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    assert_refused(&gpu, 0, gpu.map(0, a, 2 * PAGE, 0, handle), "outside of a reservation");
}

#[test]
fn access_and_unmap_across_two_reservations() {
    let gpu = gpu();
    let a = gpu.address_reserve(0, PAGE, 0).unwrap();
    let b = gpu.address_reserve(0, PAGE, 0).unwrap();
    assert_eq!(b, a + PAGE, "the two are neighbours");
    for page in [a, b] {
        let handle = gpu.physical_create(0, PAGE).unwrap();
        gpu.map(0, page, PAGE, 0, handle).unwrap();
    }
    assert_refused(&gpu, 0, gpu.set_access(0, a, 2 * PAGE, &[0]), "end of a reservation");
    assert_refused(&gpu, 1, gpu.unmap(0, a, 2 * PAGE), "end of a reservation");
    assert!(gpu.is_backed(a, 2 * PAGE), "nothing was unmapped by halves");
    for page in [a, b] {
        gpu.set_access(0, page, PAGE, &[0]).unwrap();
        gpu.unmap(0, page, PAGE).unwrap();
    }
    assert_eq!(gpu.misuses().len(), 2);
}

#[test]
fn map_at_an_offset() {
    let gpu = gpu();
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    assert_refused(&gpu, 0, gpu.map(0, base, 2 * PAGE, PAGE, handle), "offset");
}

#[test]
fn map_of_a_part_of_a_handle() {
    let gpu = gpu();
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    assert_refused(&gpu, 0, gpu.map(0, base, PAGE, 0, handle), "part of a handle");
}

#[test]
fn map_of_a_released_handle() {
    let gpu = gpu();
    let (base, [first, _]) = two_mapped(&gpu);
    gpu.physical_release(0, first).unwrap();
    assert_refused(&gpu, 0, gpu.map(0, base + 4 * PAGE, PAGE, 0, first), "does not exist");
}

#[test]
fn unmap_of_unmapped() {
    let gpu = gpu();
    let (base, _) = two_mapped(&gpu);
    assert_refused(&gpu, 0, gpu.unmap(0, base + 4 * PAGE, PAGE), "nothing is mapped");
    assert_refused(&gpu, 1, gpu.unmap(0, base, 3 * PAGE), "nothing is mapped");
    assert!(gpu.is_backed(base, 2 * PAGE), "nothing was unmapped by halves");
}

#[test]
fn unmap_over_a_hole() {
    let gpu = gpu();
    let (base, _) = two_mapped(&gpu);
    let handle = gpu.physical_create(0, PAGE).unwrap();
    gpu.map(0, base + 3 * PAGE, PAGE, 0, handle).unwrap();
    assert_refused(&gpu, 0, gpu.unmap(0, base, 4 * PAGE), "hole");
}

#[test]
fn partial_unmap() {
    let gpu = gpu();
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, 2 * PAGE).unwrap();
    gpu.map(0, base, 2 * PAGE, 0, handle).unwrap();
    assert_refused(&gpu, 0, gpu.unmap(0, base, PAGE), "part of a mapping");
    assert_refused(&gpu, 1, gpu.unmap(0, base + PAGE, PAGE), "part of a mapping");
    gpu.unmap(0, base, 2 * PAGE).unwrap();
}

#[test]
fn free_of_a_mapped_range() {
    let gpu = gpu();
    let (base, _) = two_mapped(&gpu);
    assert_refused(&gpu, 0, gpu.address_free(0, base, 8 * PAGE), "memory is mapped");
    gpu.unmap(0, base, 2 * PAGE).unwrap();
    gpu.address_free(0, base, 8 * PAGE).unwrap();
    assert_refused(&gpu, 1, gpu.address_free(0, base, 8 * PAGE), "never reserved");
}

#[test]
fn free_of_a_part_of_a_reservation() {
    let gpu = gpu();
    let base = gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    assert_refused(&gpu, 0, gpu.address_free(0, base, 2 * PAGE), "part of a reservation");
}

#[test]
fn double_release() {
    let gpu = gpu();
    let (_, [mapped, _]) = two_mapped(&gpu);
    gpu.physical_release(0, mapped).unwrap();
    assert_refused(&gpu, 0, gpu.physical_release(0, mapped), "second release");
    let unmapped = gpu.physical_create(0, PAGE).unwrap();
    gpu.physical_release(0, unmapped).unwrap();
    assert_refused(&gpu, 1, gpu.physical_release(0, unmapped), "does not exist");
}

#[test]
fn access_without_mapping() {
    let gpu = gpu();
    let (base, _) = two_mapped(&gpu);
    assert_refused(&gpu, 0, gpu.set_access(0, base + 2 * PAGE, PAGE, &[0]), "nothing is mapped");
    assert_refused(&gpu, 1, gpu.set_access(0, base, 3 * PAGE, &[0]), "nothing is mapped");
}

#[test]
fn access_for_a_foreign_device() {
    let mut config = Config::devices(2, 256 * MIB);
    config.devices[0].peers = Some(vec![]);
    let gpu = Gpu::new(config);
    let (base, _) = two_mapped(&gpu);
    assert_refused(&gpu, 0, gpu.set_access(0, base, PAGE, &[0, 1]), "no peer");
    assert_refused(&gpu, 1, gpu.set_access(0, base, PAGE, &[7]), "no peer");
    let pool = gpu.pool_create(0, 0).unwrap();
    assert_refused(&gpu, 2, gpu.pool_allow_peer(0, pool, 1), "no peer");
}

#[test]
fn sizes_that_are_not_whole_granules() {
    let gpu = gpu();
    let (base, [handle, _]) = two_mapped(&gpu);
    let results = [
        gpu.physical_create(0, PAGE + 1).map(drop),
        gpu.physical_create(0, 0).map(drop),
        gpu.address_reserve(0, MIB, 0).map(drop),
        gpu.map(0, base + 2 * PAGE + 512, PAGE, 0, handle),
        gpu.set_access(0, base, MIB, &[0]),
        gpu.unmap(0, base, 0),
    ];
    for (before, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().code, code::INVALID_VALUE, "call {before}");
    }
    assert_eq!(gpu.misuses().len(), 6);
}

#[test]
fn pool_free_of_foreign_pointers() {
    let gpu = gpu();
    let pool = gpu.pool_create(0, 0).unwrap();
    let block = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    assert_refused(&gpu, 0, gpu.pool_free(0, block + 512, 0), "no pool has handed out");
    gpu.pool_free(0, block, 0).unwrap();
    assert_refused(&gpu, 1, gpu.pool_free(0, block, 0), "no pool has handed out");
    let plain = gpu.alloc(0, MIB).unwrap();
    assert_refused(&gpu, 2, gpu.pool_free(0, plain, 0), "no pool has handed out");
}

#[test]
fn plain_free_of_foreign_pointers() {
    let gpu = gpu();
    let plain = gpu.alloc(0, MIB).unwrap();
    assert_refused(&gpu, 0, gpu.free(0, plain + 512), "no plain allocation");
    gpu.free(0, plain).unwrap();
    assert_refused(&gpu, 1, gpu.free(0, plain), "no plain allocation");
    assert_eq!(gpu.free(0, 0), Ok(()), "NULL is nobody's");
}

#[test]
fn destruction_of_a_pool_in_use() {
    let gpu = gpu();
    let pool = gpu.pool_create(0, 0).unwrap();
    let block = gpu.pool_alloc(0, pool, MIB, 0).unwrap();
    assert_refused(&gpu, 0, gpu.pool_destroy(0, pool), "in use");
    gpu.pool_free(0, block, 0).unwrap();
    gpu.pool_destroy(0, pool).unwrap();
    assert_eq!(gpu.pool_alloc(0, pool, MIB, 0).unwrap_err().code, code::INVALID_HANDLE);
    assert_eq!(gpu.books(0).physical, 0);
}

#[test]
fn values_that_an_attribute_cannot_take() {
    let gpu = gpu();
    let pool = gpu.pool_create(0, 0).unwrap();
    assert_refused(
        &gpu,
        0,
        gpu.pool_set_attribute(0, pool, PoolAttribute::UsedCurrent, 0),
        "cannot take",
    );
    assert_refused(
        &gpu,
        1,
        gpu.pool_set_attribute(0, pool, PoolAttribute::ReservedHigh, 1),
        "cannot take",
    );
}

#[test]
fn a_device_that_does_not_exist() {
    let gpu = gpu();
    assert_eq!(gpu.alloc(2, MIB).unwrap_err().code, code::INVALID_DEVICE);
}
