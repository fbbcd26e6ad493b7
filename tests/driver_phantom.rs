//! The in-process stand-in GPU keeps the promises of a driver.

#[path = "common/driver_conformance.rs"]
mod driver_conformance;

use std::sync::Arc;

use gruyere::driver::{Driver, ErrorKind, StreamHandle};
use gruyere_phantom::{Config, Gpu};
use gruyere_phantom_driver::PhantomDriver;

fn on_phantom(_name: &str, promise: fn(&dyn Driver)) {
    promise(&PhantomDriver::new(Arc::new(Gpu::new(Config::devices(2, 1 << 30)))));
}

driver_conformance!(on_phantom);

#[test]
fn what_a_device_lacks_is_not_supported() {
    let mut config = Config::devices(1, 1 << 30);
    config.devices[0].vmm = false;
    config.devices[0].pools = false;
    config.stream_ids = false;
    let driver = PhantomDriver::new(Arc::new(Gpu::new(config)));
    let capabilities = driver.capabilities(0).unwrap();
    assert!(!capabilities.vmm && !capabilities.pools && !capabilities.stream_ids);
    assert_eq!(capabilities.granularity, 0);
    assert_eq!(driver.pool_create(0, 0).unwrap_err().kind, ErrorKind::NotSupported);
    assert_eq!(driver.physical_create(0, 2 << 20).unwrap_err().kind, ErrorKind::NotSupported);
    assert_eq!(driver.stream_id(0, StreamHandle(0)).unwrap_err().kind, ErrorKind::NotSupported);
}
