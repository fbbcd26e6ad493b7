//! libphantom_cuda.so, the ABI face of the simulator, in its own process.
//!
//! A loaded library cannot be unloaded, and environment variables configure the simulator, so a
//! test that needs it runs itself again: [`on_phantom`] starts this executable once more for that
//! test, and runs the body there.

#[path = "phantom_owner.rs"]
#[allow(dead_code)]
pub mod phantom_owner;

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Set in the child: its test.
const ROLE: &str = "GRUYERE_TEST_ROLE";

/// Builds the library (a no-op if fresh) and returns its path.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["build", "--quiet", "--package", "gruyere-phantom-abi", "--message-format=json"])
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let messages = String::from_utf8(output.stdout).expect("cargo speaks UTF-8");
        let file = messages.split('"').find(|word| word.ends_with("/libphantom_cuda.so"));
        PathBuf::from(file.expect("cargo names the library"))
    })
}

/// The way of the simulator into the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// As `libcuda.so.1` on the library path.
    LibraryPath,
    /// Preloaded.
    Preload,
}

/// Runs `body` in a process that finds the simulator in place of the driver. `name` is the test's.
pub fn on_phantom(name: &str, entry: Entry, settings: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        return body();
    }
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ROLE, name);
    child.envs([phantom_owner::variable().unwrap()]).envs(settings.iter().copied());
    match entry {
        Entry::LibraryPath => {
            std::os::unix::fs::symlink(library(), folder.path().join("libcuda.so.1")).unwrap();
            child.env("LD_LIBRARY_PATH", folder.path()).env_remove("LD_PRELOAD")
        }
        Entry::Preload => child.env("LD_PRELOAD", library()),
    };
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "the child ran no test: {text}");
}

/// A function of the loaded simulator (libcuda's, or a `phantom_*` one).
///
/// # Safety
/// `F` is the type of a pointer to that function.
pub unsafe fn function<F: Copy>(name: &CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: strings are NUL-terminated; the caller vouches for the type, which has a pointer's
    // size.
    unsafe {
        let mut address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        if address.is_null() {
            let handle = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW);
            assert!(!handle.is_null(), "no stand-in is loaded");
            address = libc::dlsym(handle, name.as_ptr());
        }
        assert!(!address.is_null(), "{name:?} is not there");
        std::mem::transmute_copy(&address)
    }
}
