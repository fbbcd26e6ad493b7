//! Reserves: memory that is mapped before it is asked for, for a lifetime (`reserve:`) or a pool.
//!
//! A reserve is a floor under what its space holds. Pages of it are not moved to where others need
//! them and not trimmed; those of lifetimes are given up where the alternative is out of memory.

use crate::driver::DriverError;
use crate::pools::lifetime::Lifetime;
use crate::report::bytes::Bytes;

/// A `reserve:` that could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The device.
    pub device: u32,
    /// For which lifetime.
    pub lifetime: Lifetime,
    /// How much, in bytes.
    pub bytes: u64,
    /// Bytes that the device has free, where it can say.
    pub free: Option<u64>,
    /// The driver's answer, or the budget's.
    pub error: DriverError,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { device, lifetime, bytes, free, error } = self;
        let free =
            free.map_or_else(|| "an unknown amount".to_owned(), |free| Bytes(free).to_string());
        write!(
            f,
            "gruyere: GRUYERE_CONF reserve:{}={bytes}: {} could not be mapped on device {device} \
             ({error}), which has {free} free; reserve less, free the device, or lower headroom:",
            lifetime.name(),
            Bytes(*bytes)
        )
    }
}
