//! A driver whose calls fail: at random by a seed, or exactly the n-th, once or from then on.
#![allow(dead_code)]

use gruyere::driver::{DevicePtr, Driver, DriverError, ErrorKind, Result};
use gruyere_phantom_driver::PhantomDriver;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

/// When calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Never.
    Sound,
    /// One call in this many, with out of memory or an invalid value.
    OneIn(u64),
    /// The n-th call from now on (1: the next), with this error.
    Nth(u64, ErrorKind),
    /// The n-th and all after it.
    From(u64, ErrorKind),
}

/// The name of a call, and a function to run before it.
type Intrusion = (&'static str, Box<dyn FnOnce() + Send>);

/// [`PhantomDriver`] with faults. A failed call has no effect.
pub struct FlakyDriver {
    inner: PhantomDriver,
    calls: AtomicU64,
    plan: RwLock<Plan>,
    /// Calls that unmap or grant access over this address fail.
    bad: AtomicU64,
    refuses_peers: AtomicBool,
    /// Runs once, before the call of this name.
    intrusion: Mutex<Option<Intrusion>>,
    seed: u64,
}

impl FlakyDriver {
    /// A driver, sound until [`FlakyDriver::set`].
    pub fn new(inner: PhantomDriver, seed: u64) -> Self {
        Self {
            inner,
            calls: AtomicU64::new(0),
            plan: RwLock::new(Plan::Sound),
            bad: AtomicU64::new(0),
            refuses_peers: AtomicBool::new(false),
            intrusion: Mutex::new(None),
            seed,
        }
    }

    /// Restarts the count of calls at 1, and fails them by `plan`.
    pub fn set(&self, plan: Plan) {
        *self.plan.write().unwrap() = plan;
        self.calls.store(0, Ordering::SeqCst);
    }

    /// Calls since the last [`FlakyDriver::set`].
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Fails all calls that unmap or grant access over `address` from now on; 0: none.
    pub fn refuse_at(&self, address: u64) {
        self.bad.store(address, Ordering::SeqCst);
    }

    /// Refuses or allows access by peers from now on (`CUDA_ERROR_PEER_ACCESS_UNSUPPORTED`).
    pub fn refuse_peers(&self, refuse: bool) {
        self.refuses_peers.store(refuse, Ordering::SeqCst);
    }

    /// Runs `body` before the next call of this name, in its thread.
    pub fn intrude(&self, call: &'static str, body: impl FnOnce() + Send + 'static) {
        *self.intrusion.lock().unwrap() = Some((call, Box::new(body)));
    }

    fn fault_at(&self, call: &'static str, address: DevicePtr, bytes: u64) -> Result<()> {
        let bad = self.bad.load(Ordering::SeqCst);
        if bad != 0 && (address..address + bytes).contains(&bad) {
            return Err(DriverError::new(call, ErrorKind::InvalidValue, 999));
        }
        self.fault(call)
    }

    fn fault(&self, call: &'static str) -> Result<()> {
        let intrusion = self.intrusion.lock().unwrap().take_if(|(awaited, _)| *awaited == call);
        if let Some((_, body)) = intrusion {
            body();
        }
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let kind = match *self.plan.read().unwrap() {
            Plan::Sound => return Ok(()),
            Plan::OneIn(odds) => {
                // splitmix64 (Steele, Lea, Flood 2014) of the call's number.
                let mut z = (self.seed ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^= z >> 31;
                if !z.is_multiple_of(odds) {
                    return Ok(());
                }
                if z >> 62 & 1 == 0 { ErrorKind::OutOfMemory } else { ErrorKind::InvalidValue }
            }
            Plan::Nth(nth, kind) if nth == number => kind,
            Plan::From(nth, kind) if nth <= number => kind,
            _ => return Ok(()),
        };
        Err(DriverError::new(call, kind, 999))
    }
}

/// Returns the error of a call if the plan fails it.
macro_rules! fault {
    (set_access, $driver:ident, $device:ident, $address:ident, $bytes:ident, $peers:ident) => {
        if !$peers.is_empty() && $driver.refuses_peers.load(Ordering::SeqCst) {
            return Err(DriverError::new("set_access", ErrorKind::Other, 217));
        }
        $driver.fault_at("set_access", $address, $bytes)?
    };
    (unmap, $driver:ident, $device:ident, $address:ident, $bytes:ident) => {
        $driver.fault_at("unmap", $address, $bytes)?
    };
    ($name:ident, $driver:ident $(, $argument:ident)*) => {
        $driver.fault(stringify!($name))?
    };
}

macro_rules! flaky {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $call:ident, $bytes:expr;)*) => {
        impl Driver for FlakyDriver {
            $(fn $name(&self, $($argument: $type),*) -> Result<$result> {
                let driver = self;
                fault!($name, driver $(, $argument)*);
                driver.inner.$name($($argument),*)
            })*
        }
    };
}

gruyere::heap::each_driver_call!(flaky);

/// Runs a program once without faults, then once for each of the allocator's driver calls in it and
/// each of `kinds`, with that call failing: a lost device stays lost, any other fault happens once.
/// `make` creates a run's world with its driver; `run` gets the number of the failing call (0:
/// none), and `end` whether the driver is sound again.
#[track_caller]
pub fn fail_every_call<W>(
    named: &str,
    kinds: &[ErrorKind],
    make: impl Fn() -> W,
    driver: impl Fn(&W) -> &FlakyDriver,
    run: impl Fn(&mut W, u64),
    end: impl Fn(&mut W, bool),
) {
    let mut world = make();
    run(&mut world, 0);
    let calls = driver(&world).calls();
    end(&mut world, true);
    for nth in 1..=calls {
        for &kind in kinds {
            let lost = kind == ErrorKind::DeviceLost;
            let mut world = make();
            driver(&world).set(if lost { Plan::From(nth, kind) } else { Plan::Nth(nth, kind) });
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(&mut world, nth);
                if !lost {
                    driver(&world).set(Plan::Sound);
                }
                end(&mut world, !lost);
            }));
            assert!(ran.is_ok(), "{named}: call {nth} of {calls} failing with {kind:?}");
        }
    }
}
