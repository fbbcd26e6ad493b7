//! The calling thread's device and context, and the device of a stream. Only primary contexts are
//! served, as the runtime itself knows no others; memory of any other context is left to the real
//! functions.

use super::runtime::{Runtime, Stream, has};
use crate::heap::MAX_DEVICES;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The runtime's current device.
#[inline]
pub fn device(runtime: Runtime) -> Option<i64> {
    let mut device = -1;
    // SAFETY: `device` may be written.
    (unsafe { runtime.cudaGetDevice(&mut device) } == 0).then_some(i64::from(device))
}

/// The device that can serve a request of this thread; `None` where a context other than the
/// device's primary one is current.
///
/// A thread without a context gets the one that its first call to the runtime would have given it:
/// later calls to the driver may rely on that.
pub fn served_device(runtime: Runtime) -> Option<i64> {
    let device = device(runtime)?;
    let Some(driver) = driver() else { return Some(device) };
    let current = driver.current()?;
    if current == 0 {
        // SAFETY: cudaFree(NULL) frees nothing; it is how programs ask for their context.
        let made = unsafe { runtime.cudaFree(ptr::null_mut()) } == 0;
        // `cudaSetValidDevices` may have left the choice of the device to this call.
        return if made { self::device(runtime) } else { None };
    }
    (driver.primary(device) == Some(current)).then_some(device)
}

/// The device whose memory a request on `stream` gets: the stream's own, if it has one. `None`: a
/// stream of a context that is not primary, or one unknown to the driver.
pub fn device_of_stream(runtime: Runtime, stream: Stream, devices: u32) -> Option<i64> {
    let device = served_device(runtime)?;
    // The default streams belong to the current device; with one device, all streams do.
    if stream <= 2 || devices <= 1 {
        return Some(device);
    }
    let Some(driver) = driver() else { return Some(device) };
    let context = driver.of_stream(stream)?;
    let is_primary = |&device: &i64| driver.primary(device) == Some(context);
    // The current device first: nearly always right.
    std::iter::once(device).chain(0..i64::from(devices)).find(is_primary)
}

/// Whether `pool` is the default pool of `device`.
pub fn is_default_pool(runtime: Runtime, pool: *mut c_void, device: i64) -> bool {
    let mut default = ptr::null_mut();
    // SAFETY: `default` may be written.
    let found = unsafe { runtime.cudaDeviceGetDefaultMemPool(&mut default, device as c_int) } == 0;
    found && default == pool
}

/// Whether cudaMallocAsync allocates from the default pool of `device`; the program may have set
/// its own pool instead.
pub fn default_pool_is_current(runtime: Runtime, device: i64) -> bool {
    if !has::cudaDeviceGetMemPool(runtime) {
        return true;
    }
    let mut current = ptr::null_mut();
    // SAFETY: `current` may be written.
    let found = unsafe { runtime.cudaDeviceGetMemPool(&mut current, device as c_int) } == 0;
    found && is_default_pool(runtime, current, device)
}

/// Forgets the primary context of a device before a reset.
pub fn forget_context(device: i64) {
    if let Some(known) = PRIMARY.get(device as usize) {
        known.store(0, Ordering::Relaxed);
    }
}

/// The primary contexts, by device; 0: not asked for yet.
///
/// ```text
/// 0 -> context   primary(), of any thread; all find the same
/// context -> 0   forget_context(), before a reset
/// ```
static PRIMARY: [AtomicUsize; MAX_DEVICES as usize] =
    [const { AtomicUsize::new(0) }; MAX_DEVICES as usize];

type GetCurrent = unsafe extern "C" fn(*mut usize) -> c_uint;
type DeviceGet = unsafe extern "C" fn(*mut c_int, c_int) -> c_uint;
type PrimaryState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_uint;
type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_uint;
type AddressRange = unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_uint;
type StreamContext = unsafe extern "C" fn(usize, *mut usize) -> c_uint;

/// The driver's functions about contexts.
struct Driver {
    get_current: GetCurrent,
    device_get: DeviceGet,
    primary_state: PrimaryState,
    retain: Retain,
    stream_context: StreamContext,
    address_range: AddressRange,
}

impl Driver {
    fn current(&self) -> Option<usize> {
        let mut context = 0;
        // SAFETY: writes one context.
        (unsafe { (self.get_current)(&mut context) } == 0).then_some(context)
    }

    fn of_stream(&self, stream: Stream) -> Option<usize> {
        let mut context = 0;
        // SAFETY: the stream is the caller's, who promises that it is one; writes one context.
        (unsafe { (self.stream_context)(stream, &mut context) } == 0).then_some(context)
    }

    /// The primary context of `device` if active: a comparison creates none.
    fn primary(&self, device: i64) -> Option<usize> {
        let known = PRIMARY.get(usize::try_from(device).ok()?)?;
        match known.load(Ordering::Relaxed) {
            0 => {}
            context => return Some(context),
        }
        let (mut handle, mut flags, mut active, mut context) = (0, 0, 0, 0);
        // SAFETY: each writes what its type says. The reference is never released: the heap's
        // driver keeps one as well.
        unsafe {
            let asked = (self.device_get)(&mut handle, device as c_int) == 0
                && (self.primary_state)(handle, &mut flags, &mut active) == 0;
            if !asked || active == 0 || (self.retain)(&mut context, handle) != 0 {
                return None;
            }
        }
        known.store(context, Ordering::Relaxed);
        Some(context)
    }
}

/// The start of the driver's allocation around `address`, if the driver knows it.
pub fn start_of_allocation(address: u64) -> Option<u64> {
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: any address may be asked for; each pointer may be written.
    (unsafe { (driver()?.address_range)(&mut start, &mut bytes, address) } == 0).then_some(start)
}

/// The driver's functions, once libcuda is in the process.
fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    match DRIVER.get() {
        Some(driver) => Some(driver),
        // Not there yet: the runtime loads it when first needed.
        None => find().map(|driver| DRIVER.get_or_init(|| driver)),
    }
}

fn find() -> Option<Driver> {
    // SAFETY: dlopen and dlsym read NUL-terminated names; RTLD_NOLOAD loads nothing, and the handle
    // is kept.
    let handle =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    let look = |name: &CStr| {
        [libc::RTLD_DEFAULT, handle].into_iter().enumerate().find_map(|(place, scope)| {
            // RTLD_DEFAULT is null, as is a handle that could not be opened.
            if place == 1 && scope.is_null() {
                return None;
            }
            // SAFETY: as above.
            let address = unsafe { libc::dlsym(scope, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        })
    };
    // SAFETY: each address is of the driver's function of that name, whose signature its type is.
    unsafe {
        Some(Driver {
            get_current: std::mem::transmute::<*mut c_void, GetCurrent>(look(c"cuCtxGetCurrent")?),
            device_get: std::mem::transmute::<*mut c_void, DeviceGet>(look(c"cuDeviceGet")?),
            primary_state: std::mem::transmute::<*mut c_void, PrimaryState>(look(
                c"cuDevicePrimaryCtxGetState",
            )?),
            retain: std::mem::transmute::<*mut c_void, Retain>(look(c"cuDevicePrimaryCtxRetain")?),
            address_range: std::mem::transmute::<*mut c_void, AddressRange>(look(
                c"cuMemGetAddressRange_v2",
            )?),
            stream_context: std::mem::transmute::<*mut c_void, StreamContext>(look(
                c"cuStreamGetCtx",
            )?),
        })
    }
}
