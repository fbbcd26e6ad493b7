//! Finding libcuda: the right one is taken, and whatever is wrong is told in one clear error.
//!
//! What a process has loaded cannot be taken back, so the search is tested in processes of its own:
//! this executable, run again with `GRUYERE_TEST_ROLE` set.

use std::path::{Path, PathBuf};
use std::process::Command;

use gruyere::driver::cuda::CudaDriver;
use gruyere::driver::{Driver, ErrorKind, EventHandle, StreamHandle};

const ROLE: &str = "GRUYERE_TEST_ROLE";

/// Compiles a stand-in of `kind` to `directory/name`.
fn build(kind: &str, directory: &Path, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/small_libcuda.rs");
    let output = directory.join(name);
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "small_libcuda"])
        .args(["--cfg", kind, "-A", "unexpected_cfgs", "-o"])
        .arg(&output)
        .arg(source)
        .status()
        .expect("rustc runs");
    assert!(status.success(), "the stand-in does not compile");
    output
}

/// Runs `load_and_tell` in a process of its own with these variables; its last line of output.
fn load_in_a_process(variables: &[(&str, &Path)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "load_and_tell", "--nocapture"])
        .env(ROLE, "load")
        .env_remove("LD_PRELOAD");
    for (name, value) in variables {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().find_map(|line| line.split_once("LOADED ")).expect("the child tells").1.to_owned()
}

#[test]
fn load_and_tell() {
    if std::env::var_os(ROLE).is_none() {
        // On any machine: an answer, not a panic.
        if let Err(error) = CudaDriver::load() {
            assert_eq!(error.error.kind, ErrorKind::NoDriver);
            assert!(error.to_string().contains("libcuda"), "{error}");
        }
        return;
    }
    match CudaDriver::load() {
        Ok(driver) => println!("LOADED {}", driver.library_path().display()),
        Err(error) => println!("LOADED error {:?}: {error}", error.error.kind),
    }
}

#[test]
fn a_missing_library_is_named_with_the_linker_s_reason() {
    let error =
        CudaDriver::load_from(Path::new("/nowhere/libcuda.so.1")).err().expect("nothing is there");
    assert_eq!(error.error.kind, ErrorKind::NoDriver);
    let message = error.to_string();
    assert!(
        message.contains("/nowhere/libcuda.so.1") && message.contains("No such file"),
        "{message}"
    );
}

#[test]
fn the_toolkit_s_stub_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let error =
        CudaDriver::load_from(&build("stub", folder.path(), "libstub.so")).err().expect("a stub");
    assert_eq!((error.error.kind, error.error.code), (ErrorKind::NoDriver, 34));
    assert!(error.to_string().contains("stub"), "{error}");
}

#[test]
fn a_library_without_the_functions_is_refused_with_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let error = CudaDriver::load_from(&build("partial", folder.path(), "libpartial.so"))
        .err()
        .expect("no driver");
    assert_eq!(error.error.kind, ErrorKind::NoDriver);
    assert!(error.to_string().contains("cuMemAlloc_v2"), "{error}");
}

#[test]
fn the_search_passes_over_a_stub_and_takes_what_is_preloaded() {
    let folder = tempfile::tempdir().unwrap();
    build("stub", folder.path(), "libcuda.so");
    let good = build("old", folder.path(), "libcuda.so.1");
    // cudarc's own search would take the stub here.
    assert_eq!(
        load_in_a_process(&[("LD_LIBRARY_PATH", folder.path())]),
        good.display().to_string()
    );

    let preloaded = build("old", folder.path(), "libpreloaded.so");
    let told = load_in_a_process(&[("LD_LIBRARY_PATH", folder.path()), ("LD_PRELOAD", &preloaded)]);
    assert_eq!(told, preloaded.display().to_string());

    build("stub", folder.path(), "libcuda.so.1");
    let told = load_in_a_process(&[("LD_LIBRARY_PATH", folder.path())]);
    assert!(told.starts_with("error NoDriver") && told.contains("stub"), "{told}");
}

#[test]
fn what_an_old_driver_lacks_is_a_capability_flag_and_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let driver = CudaDriver::load_from(&build("old", folder.path(), "libold.so")).unwrap();
    assert_eq!((driver.device_count(), driver.version()), (Ok(1), 11040));
    let capabilities = driver.capabilities(0).unwrap();
    assert!(!capabilities.vmm && !capabilities.pools && !capabilities.stream_ids);
    assert_eq!((capabilities.granularity, capabilities.total_memory), (0, 16 << 30));
    assert_eq!(capabilities.name, "x".repeat(255));

    let stream = StreamHandle(0);
    let kinds = [
        driver.pool_create(0, 1 << 21).map(drop).unwrap_err().kind,
        driver.pool_free(0, 1, stream).unwrap_err().kind,
        driver.physical_create(0, 1 << 21).map(drop).unwrap_err().kind,
        driver.address_reserve(0, 1 << 21, 0).map(drop).unwrap_err().kind,
        driver.stream_id(0, stream).map(drop).unwrap_err().kind,
    ];
    assert!(kinds.iter().all(|kind| *kind == ErrorKind::NotSupported), "{kinds:?}");
    assert_eq!(driver.memory_info(1).unwrap_err().kind, ErrorKind::InvalidValue);
}

#[test]
fn answers_are_classified_and_calls_run_in_the_device_s_context() {
    let folder = tempfile::tempdir().unwrap();
    let driver = CudaDriver::load_from(&build("old", folder.path(), "libold.so")).unwrap();
    let (event, stream) = (EventHandle(1), StreamHandle(0));
    // The stand-in hands out memory only where the primary context is current; each call, failed
    // ones too, must leave none.
    for _ in 0..3 {
        assert_eq!(driver.alloc(0, 512), Ok(0x7000_0000));
        assert_eq!(driver.event_query(0, event), Ok(false));
        assert_eq!(driver.event_create(0).unwrap_err().kind, ErrorKind::OutOfMemory);
        assert_eq!(driver.event_record(0, event, stream).unwrap_err().kind, ErrorKind::Capturing);
        assert_eq!(driver.event_synchronize(0, event).unwrap_err().kind, ErrorKind::DeviceLost);
        assert_eq!(
            driver.stream_synchronize(0, stream).unwrap_err().kind,
            ErrorKind::Deinitialized
        );
        assert_eq!(driver.capture_status(0, stream).unwrap_err().kind, ErrorKind::Capturing);
        let unknown = driver.memory_info(0).unwrap_err();
        assert_eq!((unknown.kind, unknown.code), (ErrorKind::Other, 4242));
    }
    // SAFETY: the stand-in's own function, which writes one pointer.
    let current = unsafe {
        let name = std::ffi::CString::new(driver.library_path().to_str().unwrap()).unwrap();
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW);
        let address = libc::dlsym(handle, c"cuCtxGetCurrent".as_ptr());
        let current: unsafe extern "C" fn(*mut usize) -> u32 = std::mem::transmute(address);
        let mut context = 1;
        assert_eq!(current(&mut context), 0);
        context
    };
    assert_eq!(current, 0, "a context was left behind");
}
