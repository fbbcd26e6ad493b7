//! `PHANTOM_PRICES`: the stand-in's C ABI charges what the file says.

#[path = "common/phantom_library.rs"]
#[allow(dead_code)]
mod phantom_library;

use gruyere::driver::Driver;
use gruyere::driver::cuda::CudaDriver;
use phantom_library::{Entry, function, library, on_phantom};
use std::process::Command;

const PAGE: u64 = 2 << 20;

/// Virtual host time of one access call over four mappings of a page.
fn access() -> u64 {
    let driver = CudaDriver::load().unwrap();
    // SAFETY: phantom_host_now(void).
    let now: extern "C" fn() -> u64 = unsafe { function(c"phantom_host_now") };
    let address = driver.address_reserve(0, 4 * PAGE, PAGE).unwrap();
    for page in 0..4 {
        let handle = driver.physical_create(0, PAGE).unwrap();
        driver.map(0, address + page * PAGE, PAGE, handle).unwrap();
    }
    let before = now();
    driver.set_access(0, address, 4 * PAGE, &[]).unwrap();
    now() - before
}

#[test]
fn access_costs_the_c_abi_what_the_named_prices_say() {
    let name = "access_costs_the_c_abi_what_the_named_prices_say";
    on_phantom(name, Entry::LibraryPath, &[("PHANTOM_PRICES", "by-mapping")], || {
        assert_eq!(access(), 4 * 38_000)
    });
}

#[test]
fn access_costs_the_c_abi_a_call_where_nobody_named_prices() {
    let name = "access_costs_the_c_abi_a_call_where_nobody_named_prices";
    on_phantom(name, Entry::LibraryPath, &[("PHANTOM_COSTS", "calls")], || {
        assert_eq!(access(), 39_500)
    });
}

#[test]
fn prices_that_make_no_sense_end_the_process_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library(), folder.path().join("libcuda.so.1")).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "access_costs_the_c_abi_what_the_named_prices_say", "--nocapture"]);
    child.env("GRUYERE_TEST_ROLE", "access_costs_the_c_abi_what_the_named_prices_say");
    let output = child
        .env("LD_LIBRARY_PATH", folder.path())
        .env("PHANTOM_PRICES", "by-cal")
        .envs([phantom_library::phantom_owner::variable().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("PHANTOM_PRICES: prices by-cal: no prices of this name ship"), "{said}");
}
