//! The simulated GPU: the driver's memory side, with exact books, a virtual timeline and an oracle
//! of stream order.
//!
//! [`Gpu`] has the driver's calls as methods, callable from any thread. It keeps books of address
//! space and physical memory, charges each call on a virtual clock, refuses and notes every misuse
//! that the driver refuses ([`Gpu::misuses`]), fails on request ([`Gpu::inject`]), and checks the
//! order of reuse ([`Gpu::faults`], [`oracle`]) of the blocks that the harness reports
//! ([`Gpu::block_malloc`] and the rest).
//!
//! ```
//! use gruyere_phantom::{Config, Gpu, StreamKind, as_program};
//!
//! let gpu = Gpu::new(Config::new(1 << 30));
//! let [a, b] = [0; 2].map(|_| gpu.stream_create(0, StreamKind::NonBlocking).unwrap());
//! // The allocator gets memory and cuts a block from it.
//! let memory = gpu.alloc(0, 2 << 20).unwrap();
//! gpu.block_malloc(1, memory, 1 << 20, 0, a);
//! // The program uses it: three kernels of 20 us.
//! gpu.launch(0, a, 3, 20_000).unwrap();
//! as_program(|| gpu.stream_synchronize(0, b)).unwrap();
//! // The block is freed and reused on another stream, with no order between the two.
//! gpu.block_free(memory);
//! gpu.block_malloc(2, memory, 1 << 20, 0, b);
//! assert!(gpu.faults()[0].to_string().contains("not ordered before it"));
//! ```
//!
//! The simulator computes nothing and has no device memory: addresses are numbers, unless an
//! [`AddressProvider`] maps memory behind them.

#![deny(unsafe_code)]

mod addresses;
mod backing;
mod books;
mod calls;
mod capture;
mod config;
mod costs;
pub mod error;
mod gpu;
mod inject;
pub mod oracle;
mod pool;
mod prices;
mod ranges;
mod rendezvous;
mod streams;
mod timeline;
mod values;
mod vmm;

pub use addresses::{AddressProvider, CountingAddresses};
pub use backing::{Backing, Source};
pub use books::{AddressBooks, DeviceBooks};
pub use calls::{CallCounts, CallKind, Caller, as_program, current_caller};
pub use capture::{CaptureMode, CaptureStatus, exchange_capture_mode, relaxed};
pub use config::{CapturingIds, Config, DestroyedStreams, DeviceConfig};
pub use costs::Costs;
pub use error::{SimError, SimResult};
pub use gpu::{Gpu, Half, Held, HostFunction, HostTime, Misuse, PoolBooks};
pub use inject::Injection;
pub use pool::{POOL_ALIGNMENT, POOL_CHUNK, PoolAttribute};
pub use prices::{PriceError, Prices};
pub use rendezvous::Deadlock;
pub use streams::{StreamKind, vouching};
pub use values::Comparison;

/// The granule of virtual memory management, bytes.
pub const GRANULARITY: u64 = 2 << 20;
