//! A driver that nothing calls: for a heap that only keeps books of another allocator's memory.

use super::{Capabilities, Driver, DriverError, ErrorKind, Result};

/// As many devices as there may be, with nothing known of them; every call answers `NotSupported`.
#[derive(Clone, Copy, Debug)]
pub struct AbsentDriver {
    /// The number of devices to report.
    pub devices: u32,
}

macro_rules! answer {
    (device_count, $driver:expr) => {
        Ok($driver.devices)
    };
    (capabilities, $driver:expr) => {
        Ok(Capabilities {
            vmm: false,
            pools: false,
            stream_ids: false,
            context_events: false,
            gpu_direct_rdma: false,
            granularity: 0,
            total_memory: 0,
            host_memory: None,
            name: String::new(),
            uuid: [0; 16],
            compute_capability: (0, 0),
        })
    };
    ($name:ident, $driver:expr) => {
        Err(DriverError::new(stringify!($name), ErrorKind::NotSupported, 0))
    };
}

macro_rules! absent {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $call:ident, $bytes:expr;)*) => {
        impl Driver for AbsentDriver {
            $(fn $name(&self, $(_: $type),*) -> Result<$result> {
                answer!($name, self)
            })*
        }
    };
}

crate::each_driver_call!(absent);
