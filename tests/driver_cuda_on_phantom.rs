//! CUDA's driver keeps the promises of a driver, over a stand-in libcuda; and it leaves the calling
//! thread as it was.

#[path = "common/driver_conformance.rs"]
mod driver_conformance;
#[path = "common/phantom_library.rs"]
mod phantom_library;

use gruyere::driver::cuda::{CudaDriver, HandleType};
use gruyere::driver::{CaptureStatus, Driver, ErrorKind, StreamHandle};
use phantom_library::{Entry, function, on_phantom};

const TWO_DEVICES: &[(&str, &str)] = &[("PHANTOM_DEVICES", "2"), ("PHANTOM_MEMORY", "1GiB")];
const MIB: u64 = 1 << 20;
const LEGACY: StreamHandle = StreamHandle(0);
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`, which is every thread's unless it says otherwise, and torch's
/// for its graphs.
const GLOBAL: u32 = 0;

fn on_libcuda(name: &str, promise: fn(&dyn Driver)) {
    on_phantom(name, Entry::LibraryPath, TWO_DEVICES, || promise(&CudaDriver::load().unwrap()));
}

driver_conformance!(on_libcuda);

/// The thread's current context.
fn current() -> usize {
    let mut context = usize::MAX;
    // SAFETY: cuCtxGetCurrent(CUcontext *).
    let get: unsafe extern "C" fn(*mut usize) -> u32 = unsafe { function(c"cuCtxGetCurrent") };
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { get(&mut context) }, 0);
    context
}

fn set_current(context: usize) {
    // SAFETY: cuCtxSetCurrent(CUcontext).
    let set: extern "C" fn(usize) -> u32 = unsafe { function(c"cuCtxSetCurrent") };
    assert_eq!(set(context), 0);
}

fn primary(device: i32) -> usize {
    let mut context = 0;
    // SAFETY: cuDevicePrimaryCtxRetain(CUcontext *, CUdevice).
    let retain: unsafe extern "C" fn(*mut usize, i32) -> u32 =
        unsafe { function(c"cuDevicePrimaryCtxRetain") };
    // SAFETY: writes one pointer.
    assert_eq!(unsafe { retain(&mut context, device) }, 0);
    context
}

/// Sets this thread's capture mode; what it was.
fn exchange_mode(mut mode: u32) -> u32 {
    // SAFETY: cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *).
    let exchange: unsafe extern "C" fn(*mut u32) -> u32 =
        unsafe { function(c"cuThreadExchangeStreamCaptureMode") };
    // SAFETY: reads and writes one enum.
    assert_eq!(unsafe { exchange(&mut mode) }, 0);
    mode
}

/// Calls of every sort, some of which fail.
fn call_everything(driver: &CudaDriver, device: u32) {
    let address = driver.alloc(device, MIB).unwrap();
    let event = driver.event_create(device).unwrap();
    let stream = driver.stream_create(device).unwrap();
    driver.memset(device, address, 1, MIB, stream).unwrap();
    driver.event_record(device, event, stream).unwrap();
    driver.stream_wait_event(device, LEGACY, event).unwrap();
    driver.event_query(device, event).unwrap();
    driver.event_synchronize(device, event).unwrap();
    driver.stream_id(device, stream).unwrap();
    driver.capture_status(device, stream).unwrap();
    driver.memory_info(device).unwrap();
    driver.stream_destroy(device, stream).unwrap();
    driver.event_destroy(device, event).unwrap();
    driver.device_synchronize(device).unwrap();
    driver.free(device, address).unwrap();
    driver.free(device, address).unwrap_err();
    driver.alloc(device, 1 << 40).unwrap_err();
    driver.unmap(device, 0x1000, 2 * MIB).unwrap_err();
    driver.set_access(device, 0x1000, 2 * MIB, &[7]).unwrap_err();
}

#[test]
fn the_caller_s_context_is_left_as_found() {
    on_phantom("the_caller_s_context_is_left_as_found", Entry::LibraryPath, TWO_DEVICES, || {
        let driver = CudaDriver::load().unwrap();
        assert_eq!(current(), 0, "loading leaves no context");
        driver.capabilities(0).unwrap();
        for found in [0, primary(0), primary(1)] {
            set_current(found);
            for device in [0, 1, 0] {
                call_everything(&driver, device);
                assert_eq!(current(), found);
            }
        }
    });
}

#[test]
fn the_capture_mode_is_left_as_found() {
    on_phantom("the_capture_mode_is_left_as_found", Entry::LibraryPath, TWO_DEVICES, || {
        let driver = CudaDriver::load().unwrap();
        for mode in [GLOBAL, 1, 2] {
            exchange_mode(mode);
            call_everything(&driver, 0);
            assert_eq!(exchange_mode(mode), mode);
        }
    });
}

#[test]
fn a_capture_elsewhere_neither_stops_us_nor_breaks() {
    on_phantom(
        "a_capture_elsewhere_neither_stops_us_nor_breaks",
        Entry::LibraryPath,
        TWO_DEVICES,
        || {
            let driver = CudaDriver::load().unwrap();
            let stream = driver.stream_create(0).unwrap();
            let event = driver.event_create(0).unwrap();
            // SAFETY: declared so in crates/phantom/abi/src/control.rs.
            let (begin, end) = unsafe {
                (
                    function::<extern "C" fn(usize, u32) -> u32>(c"phantom_begin_capture"),
                    function::<extern "C" fn(usize) -> u32>(c"phantom_end_capture"),
                )
            };
            // SAFETY: cuMemAlloc_v2(CUdeviceptr *, size_t).
            let plain: unsafe extern "C" fn(*mut u64, usize) -> u32 =
                unsafe { function(c"cuMemAlloc_v2") };

            assert_eq!(begin(stream.0, GLOBAL), 0);
            let CaptureStatus::Active(id) = driver.capture_status(0, stream).unwrap() else {
                panic!("no capture")
            };
            for turn in [0, 1] {
                // From the capturing thread, then from another.
                let work = || {
                    let address = driver.alloc(0, MIB).unwrap();
                    driver.free(0, address).unwrap();
                    let pages = driver.physical_create(0, 2 * MIB).unwrap();
                    driver.physical_release(0, pages).unwrap();
                    assert_eq!(driver.event_query(0, event), Ok(true));
                    let other = driver.stream_create(0).unwrap();
                    driver.event_record(0, event, other).unwrap();
                    driver.event_synchronize(0, event).unwrap();
                    driver.stream_destroy(0, other).unwrap();
                };
                if turn == 0 {
                    work()
                } else {
                    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
                }
                assert_eq!(driver.capture_status(0, stream), Ok(CaptureStatus::Active(id)));
            }
            assert_eq!(end(stream.0), 0, "the capture is whole");
            assert_eq!(driver.capture_status(0, stream), Ok(CaptureStatus::None));

            // The stand-in does enforce it: the same call without our precaution breaks the
            // capture.
            assert_eq!(begin(stream.0, GLOBAL), 0);
            set_current(primary(0));
            let mut address = 0;
            // SAFETY: writes one address.
            assert_ne!(unsafe { plain(&mut address, 512) }, 0);
            assert_eq!(driver.capture_status(0, stream), Ok(CaptureStatus::Invalidated));
            assert_ne!(end(stream.0), 0);
        },
    );
}

#[test]
fn a_preloaded_stand_in_is_the_driver() {
    on_phantom("a_preloaded_stand_in_is_the_driver", Entry::Preload, TWO_DEVICES, || {
        let driver = CudaDriver::load().unwrap();
        assert!(
            driver.library_path().ends_with("libphantom_cuda.so"),
            "{}",
            driver.library_path().display()
        );
        assert_eq!(driver.device_count(), Ok(2));
        call_everything(&driver, 1);
    });
}

#[test]
fn what_a_device_lacks_is_not_supported() {
    let settings = &[("PHANTOM_WITHOUT", "vmm,pools,stream_ids")];
    on_phantom("what_a_device_lacks_is_not_supported", Entry::LibraryPath, settings, || {
        let driver = CudaDriver::load().unwrap();
        let capabilities = driver.capabilities(0).unwrap();
        assert!(!capabilities.vmm && !capabilities.pools);
        assert_eq!(capabilities.granularity, 0);
        assert_eq!(driver.pool_create(0, 0).unwrap_err().kind, ErrorKind::NotSupported);
        assert_eq!(driver.physical_create(0, 2 * MIB).unwrap_err().kind, ErrorKind::NotSupported);
        assert_eq!(driver.stream_id(0, LEGACY).unwrap_err().kind, ErrorKind::NotSupported);
        // The plain way still works.
        let address = driver.alloc(0, MIB).unwrap();
        driver.free(0, address).unwrap();
    });
}

#[test]
fn without_devices_there_is_no_driver() {
    on_phantom(
        "without_devices_there_is_no_driver",
        Entry::LibraryPath,
        &[("PHANTOM_DEVICES", "0")],
        || {
            let error = CudaDriver::load().err().expect("no devices");
            assert_eq!(error.error.kind, ErrorKind::NoDriver);
            assert!(error.to_string().contains("no device"), "{error}");
        },
    );
}

#[test]
fn a_forked_child_is_told_that_cuda_is_not_for_it() {
    on_phantom(
        "a_forked_child_is_told_that_cuda_is_not_for_it",
        Entry::LibraryPath,
        TWO_DEVICES,
        || {
            let driver = CudaDriver::load().unwrap();
            call_everything(&driver, 0);
            // SAFETY: this process has no other running thread of ours (one test, one at a time);
            // the child ends by _exit.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let told = CudaDriver::load()
                    .err()
                    .is_some_and(|error| error.to_string().contains("forked"));
                // SAFETY: ends the child without exit handlers.
                unsafe { libc::_exit(i32::from(told)) };
            }
            let mut status = 0;
            // SAFETY: waits for our own child.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1, "status {status}");
            call_everything(&driver, 0);
        },
    );
}

/// As what the memory behind `address` was created: its handle types, and [`RDMA`].
fn created_as(address: u64) -> i32 {
    // SAFETY: declared so in crates/phantom/abi/src/control.rs.
    let ask: extern "C" fn(u64) -> i32 = unsafe { function(c"phantom_created_as") };
    ask(address)
}

const POSIX: i32 = 1;
const FABRIC: i32 = 8;
const RDMA: i32 = 256;

/// As what a driver creates memory that can then be used, on a stand-in of these settings.
fn creates(name: &str, settings: &[(&str, &str)], cases: &'static [(HandleType, i32)]) {
    on_phantom(name, Entry::LibraryPath, settings, || {
        for &(wish, expected) in cases {
            let driver = CudaDriver::load().unwrap().with_handle_type(wish);
            let bytes = driver.capabilities(0).unwrap().granularity;
            let before = driver.memory_info(0).unwrap();
            let handle = driver.physical_create(0, bytes).unwrap();
            let address = driver.address_reserve(0, bytes, bytes).unwrap();
            driver.map(0, address, bytes, handle).unwrap();
            driver.set_access(0, address, bytes, &[]).unwrap();
            assert_eq!(created_as(address), expected, "{wish:?}");
            driver.unmap(0, address, bytes).unwrap();
            driver.address_free(0, address, bytes).unwrap();
            driver.physical_release(0, handle).unwrap();
            assert_eq!(driver.memory_info(0).unwrap(), before, "what was tried is given back");
        }
    });
}

#[test]
fn memory_is_created_exportable_where_the_device_offers_it() {
    creates(
        "memory_is_created_exportable_where_the_device_offers_it",
        &[],
        &[
            (HandleType::Auto, POSIX | RDMA),
            (HandleType::Posix, POSIX | RDMA),
            (HandleType::None, RDMA),
            (HandleType::Fabric, RDMA),
        ],
    );
}

#[test]
fn fabric_handles_are_asked_for_where_they_are_wished() {
    creates(
        "fabric_handles_are_asked_for_where_they_are_wished",
        &[("PHANTOM_HANDLE_TYPES", "posix,fabric")],
        &[(HandleType::Fabric, FABRIC | RDMA), (HandleType::Auto, POSIX | RDMA)],
    );
}

#[test]
fn an_export_that_is_refused_is_found_out_before_memory_is_made_for_it() {
    creates(
        "an_export_that_is_refused_is_found_out_before_memory_is_made_for_it",
        &[("PHANTOM_HANDLE_TYPES", "posix,fabric,refused")],
        &[(HandleType::Auto, RDMA), (HandleType::Fabric, RDMA)],
    );
}

#[test]
fn rdma_that_a_device_promises_and_refuses_is_not_asked_for() {
    for rdma in ["refused", "without-access"] {
        creates(
            "rdma_that_a_device_promises_and_refuses_is_not_asked_for",
            &[("PHANTOM_RDMA", rdma)],
            &[(HandleType::Auto, POSIX), (HandleType::None, 0)],
        );
    }
}

#[test]
fn a_device_without_any_of_it_creates_memory_all_the_same() {
    creates(
        "a_device_without_any_of_it_creates_memory_all_the_same",
        &[("PHANTOM_RDMA", "missing"), ("PHANTOM_HANDLE_TYPES", "none")],
        &[(HandleType::Auto, 0), (HandleType::Posix, 0)],
    );
}

/// The next `cuMemSetAccess` calls from the `nth` on answer that the driver is not ready.
fn is_not_ready(nth: u64, for_ever: bool) {
    // SAFETY: declared so in crates/phantom/abi/src/control.rs.
    let fail: extern "C" fn(*const std::ffi::c_char, u64, u32, i32) -> u32 =
        unsafe { function(c"phantom_fail") };
    assert_eq!(fail(c"cuMemSetAccess".as_ptr(), nth, 600, i32::from(for_ever)), 0);
}

#[test]
fn access_is_asked_for_again_while_the_driver_is_not_ready_but_not_for_ever() {
    let name = "access_is_asked_for_again_while_the_driver_is_not_ready_but_not_for_ever";
    on_phantom(name, Entry::LibraryPath, &[], || {
        let driver = CudaDriver::load().unwrap();
        let bytes = driver.capabilities(0).unwrap().granularity;
        let handle = driver.physical_create(0, bytes).unwrap();
        let address = driver.address_reserve(0, bytes, bytes).unwrap();
        driver.map(0, address, bytes, handle).unwrap();
        (1..=5).for_each(|nth| is_not_ready(nth, false));
        driver.set_access(0, address, bytes, &[]).unwrap();
        is_not_ready(1, true);
        assert_eq!(driver.set_access(0, address, bytes, &[]).unwrap_err().code, 600);
    });
}

#[test]
fn a_device_that_shares_the_hosts_memory_tells_what_the_host_has() {
    let name = "a_device_that_shares_the_hosts_memory_tells_what_the_host_has";
    on_phantom(name, Entry::LibraryPath, &[("PHANTOM_INTEGRATED", "on")], || {
        let told =
            CudaDriver::load().unwrap().capabilities(0).unwrap().host_memory.expect("it shares");
        let line = |name: &str| -> u64 {
            let text = std::fs::read_to_string("/proc/meminfo").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned();
            line.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
        };
        assert!((1..=line("MemTotal:")).contains(&told));
        let now = line("MemAvailable:");
        assert!(told.abs_diff(now) < now / 2, "{told} and {now} are of the same moment, nearly");
    });
}
