//! A driver whose calls fail: at random by a seed, or exactly the n-th, once or from then on.
#![allow(dead_code)]

use gruyere::driver::{
    Capabilities, CaptureStatus, DeviceId, DevicePtr, Driver, DriverError, ErrorKind, EventHandle,
    MemoryInfo, PhysicalHandle, PoolAttribute, PoolHandle, Result, StreamHandle,
};
use gruyere_phantom_driver::PhantomDriver;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

/// When calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Never.
    Sound,
    /// One call in so many, with out-of-memory or an invalid value.
    OneIn(u64),
    /// The n-th call from now on (1: the next), with this error.
    Nth(u64, ErrorKind),
    /// The n-th and all after it.
    From(u64, ErrorKind),
}

/// The name of a call, and what runs before it.
type Intrusion = (&'static str, Box<dyn FnOnce() + Send>);

/// [`PhantomDriver`] with faults. A call that fails has not been made.
pub struct FlakyDriver {
    inner: PhantomDriver,
    calls: AtomicU64,
    plan: RwLock<Plan>,
    /// Calls that unmap or grant access over this address fail.
    bad: AtomicU64,
    refuses_peers: AtomicBool,
    /// The call before which this runs, once.
    intrusion: Mutex<Option<Intrusion>>,
    seed: u64,
}

impl FlakyDriver {
    /// A sound driver, until told otherwise.
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

    /// Counts calls from 1 again, and fails them by `plan`.
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

    /// Refuses peers access from now on (`CUDA_ERROR_PEER_ACCESS_UNSUPPORTED`), or no longer.
    pub fn refuse_peers(&self, refuse: bool) {
        self.refuses_peers.store(refuse, Ordering::SeqCst);
    }

    /// Runs `body` in the thread that makes the next call of this name, before it is made.
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

/// Delegates to the stand-in GPU, unless the call is to fail.
macro_rules! delegate {
    (
        $(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*
        by hand: { $($by_hand:tt)* }
    ) => {
        impl Driver for FlakyDriver {
            $($by_hand)*
            $(fn $name(&self $(, $argument: $type)*) -> $result {
                self.fault(stringify!($name))?;
                self.inner.$name($($argument),*)
            })*
        }
    };
}

delegate! {
    fn device_count(&self) -> Result<u32>;
    fn capabilities(&self, device: DeviceId) -> Result<Capabilities>;
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;
    fn pool_create(&self, device: DeviceId, max_size: u64) -> Result<PoolHandle>;
    fn pool_destroy(&self, device: DeviceId, pool: PoolHandle) -> Result<()>;
    fn pool_attribute(
        &self, device: DeviceId, pool: PoolHandle, attribute: PoolAttribute
    ) -> Result<u64>;
    fn pool_set_attribute(
        &self, device: DeviceId, pool: PoolHandle, attribute: PoolAttribute, value: u64
    ) -> Result<()>;
    fn pool_trim(&self, device: DeviceId, pool: PoolHandle, keep: u64) -> Result<()>;
    fn pool_allow_peer(&self, device: DeviceId, pool: PoolHandle, peer: DeviceId) -> Result<()>;
    fn pool_alloc(
        &self, device: DeviceId, pool: PoolHandle, bytes: u64, stream: StreamHandle
    ) -> Result<DevicePtr>;
    fn pool_free(&self, device: DeviceId, address: DevicePtr, stream: StreamHandle) -> Result<()>;
    fn address_reserve(&self, device: DeviceId, bytes: u64, align: u64) -> Result<DevicePtr>;
    fn address_free(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()>;
    fn physical_create(&self, device: DeviceId, bytes: u64) -> Result<PhysicalHandle>;
    fn physical_release(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()>;
    fn map(
        &self, device: DeviceId, address: DevicePtr, bytes: u64, handle: PhysicalHandle
    ) -> Result<()>;
    fn alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr>;
    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()>;
    fn memset(
        &self, device: DeviceId, address: DevicePtr, value: u8, bytes: u64, stream: StreamHandle
    ) -> Result<()>;
    fn event_create(&self, device: DeviceId) -> Result<EventHandle>;
    fn event_destroy(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    fn event_record(
        &self, device: DeviceId, event: EventHandle, stream: StreamHandle
    ) -> Result<()>;
    fn context_event_record(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    fn event_query(&self, device: DeviceId, event: EventHandle) -> Result<bool>;
    fn event_synchronize(&self, device: DeviceId, event: EventHandle) -> Result<()>;
    fn stream_wait_event(
        &self, device: DeviceId, stream: StreamHandle, event: EventHandle
    ) -> Result<()>;
    fn stream_create(&self, device: DeviceId) -> Result<StreamHandle>;
    fn stream_destroy(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> Result<()>;
    fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> Result<u64>;
    fn capture_status(&self, device: DeviceId, stream: StreamHandle) -> Result<CaptureStatus>;
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;
    by hand: {
        fn set_access(
            &self, device: DeviceId, address: DevicePtr, bytes: u64, peers: &[DeviceId]
        ) -> Result<()> {
            if !peers.is_empty() && self.refuses_peers.load(Ordering::SeqCst) {
                return Err(DriverError::new("set_access", ErrorKind::Other, 217));
            }
            self.fault_at("set_access", address, bytes)?;
            self.inner.set_access(device, address, bytes, peers)
        }
        fn unmap(&self, device: DeviceId, address: DevicePtr, bytes: u64) -> Result<()> {
            self.fault_at("unmap", address, bytes)?;
            self.inner.unmap(device, address, bytes)
        }
    }
}

/// Runs a program once soundly, and once for each driver call that the allocator makes in it and
/// each of `kinds`, that call failing: a device that is lost stays so, all else fails once. `make`
/// makes the world of a run, with its driver; `run` is told which call fails (0: none), and `end`
/// whether the driver is sound again.
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
