//! The C programs built into the command by `build.rs`: the probe and the canaries of tests/gpu.
//!
//! Each runs in a process of its own: this command, started with a hidden first word, enters the
//! program before it does anything else. The probe forks, so there must be no second thread; and
//! both load a driver that may crash or hang their process.

use std::ffi::{CString, OsString, c_char, c_int};
use std::os::unix::ffi::OsStringExt as _;
use std::process::{Command, ExitCode};

use crate::signals;

unsafe extern "C" {
    fn gruyere_probe_main(count: c_int, words: *mut *mut c_char) -> c_int;
    fn gruyere_canaries_main(count: c_int, words: *mut *mut c_char) -> c_int;
}

/// One of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Checks the driver's rules, and measures the cost of its calls.
    Probe,
    /// Kernels that write and check the contents of the library's blocks.
    Canaries,
}

impl Program {
    /// The first word of a command line that starts this program.
    const fn word(self) -> &'static str {
        match self {
            Program::Probe => "--gpu-probe",
            Program::Canaries => "--gpu-canaries",
        }
    }

    /// This command, started as that program; it ends when we do.
    pub fn command(self) -> Command {
        // The file may have been replaced since the start; /proc/self/exe is the running program.
        let mut command = Command::new("/proc/self/exe");
        signals::ends_with_us(command.arg(self.word()));
        command
    }
}

/// If this process was started as a program, runs it and returns its exit code.
pub fn run_as_asked(mut words: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let own = words.next()?;
    let word = words.next()?;
    let program =
        [Program::Probe, Program::Canaries].into_iter().find(|program| word == program.word())?;
    let words = std::iter::once(own).chain(words);
    // A word of a command line contains no zero byte.
    let words: Vec<CString> = words.filter_map(|word| CString::new(word.into_vec()).ok()).collect();
    let Ok(count) = c_int::try_from(words.len()) else { return Some(ExitCode::FAILURE) };
    let end = std::iter::once(std::ptr::null_mut());
    let mut words: Vec<*mut c_char> = words.into_iter().map(CString::into_raw).chain(end).collect();
    // SAFETY: a C main's arguments: `argc` strings of its own, zero-terminated and never freed,
    // then a null pointer. The process has a single thread, as at a program's start.
    let code = unsafe {
        match program {
            Program::Probe => gruyere_probe_main(count, words.as_mut_ptr()),
            Program::Canaries => gruyere_canaries_main(count, words.as_mut_ptr()),
        }
    };
    Some(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}
