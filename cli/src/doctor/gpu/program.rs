//! The C programs that come with the command: the probe and the canaries of tests/gpu, built by
//! `build.rs`.
//!
//! Each runs in a process of its own, which is this command started with one word that the help
//! does not name, and enters the program before anything else is done: the probe forks, so there
//! must be no second thread, and both bring a driver into their process that may crash or hang it.

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
    /// What rules the driver has, and what its calls cost.
    Probe,
    /// Kernels write and check what lies in blocks of the library.
    Canaries,
}

impl Program {
    /// The first word of a command that is one of them.
    const fn word(self) -> &'static str {
        match self {
            Program::Probe => "--gpu-probe",
            Program::Canaries => "--gpu-canaries",
        }
    }

    /// This command as that program; it ends when we do.
    pub fn command(self) -> Command {
        // The file may have been replaced since we began; this is still the one that runs.
        let mut command = Command::new("/proc/self/exe");
        signals::ends_with_us(command.arg(self.word()));
        command
    }
}

/// Where this process was started as one of the programs: runs it, for its exit code.
pub fn run_as_asked(mut words: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let own = words.next()?;
    let word = words.next()?;
    let program =
        [Program::Probe, Program::Canaries].into_iter().find(|program| word == program.word())?;
    let words = std::iter::once(own).chain(words);
    // A word of a command line has no zero byte.
    let words: Vec<CString> = words.filter_map(|word| CString::new(word.into_vec()).ok()).collect();
    let Ok(count) = c_int::try_from(words.len()) else { return Some(ExitCode::FAILURE) };
    let end = std::iter::once(std::ptr::null_mut());
    let mut words: Vec<*mut c_char> = words.into_iter().map(CString::into_raw).chain(end).collect();
    // SAFETY: a C main's arguments: so many strings of its own, which end in zero and are never
    // taken back, and a null pointer behind them. There is one thread yet, as where a program
    // begins.
    let code = unsafe {
        match program {
            Program::Probe => gruyere_probe_main(count, words.as_mut_ptr()),
            Program::Canaries => gruyere_canaries_main(count, words.as_mut_ptr()),
        }
    };
    Some(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}
