//! The call log: one line per call of an exported function, with its arguments and result. It
//! serves to compare a program call for call with and without a layer between it and this library.
//!
//! `PHANTOM_CALL_LOG` names the file (`%p`: the process id). A line is `cudaMalloc(out, 1024) = 0
//! d+0x200000`: the function, its arguments, the code, and after a success the values written to
//! its result pointers. Meaningless differences between runs are left out: addresses of device
//! memory count from the start of the window (`d+`), those of the host's are `host`. The log omits
//! functions that are not simulated or only report errors.

use crate::abi::{In, Out, SomeResult, Text};
use crate::gpu::try_gpu;
use crate::process::{self, Phase};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::OnceLock;

/// `None`: no log.
fn file() -> Option<&'static File> {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    FILE.get_or_init(|| {
        let name = std::env::var("PHANTOM_CALL_LOG").ok().filter(|name| !name.is_empty())?;
        let name = name.replace("%p", &std::process::id().to_string());
        match OpenOptions::new().create(true).append(true).open(&name) {
            Ok(file) => Some(file),
            Err(error) => {
                eprintln!("phantom: PHANTOM_CALL_LOG={name}: {error}");
                std::process::abort();
            }
        }
    })
    .as_ref()
}

/// A line for a call that has not ended.
pub struct Line(String);

/// Begins a line if there is a log.
pub fn begin(name: &str, arguments: impl FnOnce(&mut String)) -> Option<Line> {
    file().filter(|_| process::phase() != Phase::ForkedChild)?;
    let mut text = format!("{name}(");
    arguments(&mut text);
    let kept = text.trim_end_matches(", ").len();
    text.truncate(kept);
    Some(Line(text))
}

impl Line {
    /// Writes the line whole, so that lines of several threads do not mix.
    pub fn end(mut self, code: u32, results: impl FnOnce(&mut String)) {
        let _ = write!(self.0, ") = {code}");
        if code == 0 {
            results(&mut self.0);
        }
        self.0.push('\n');
        if let Some(mut file) = file() {
            // A full disk must not fail the program's call; the log shows as short.
            let _ = file.write_all(self.0.as_bytes());
        }
    }
}

/// An argument of an exported function.
pub trait Argument {
    /// Appends the caller's value.
    fn passed(&self, line: &mut String);
    /// Appends the result that the caller got through it.
    fn got(&self, _line: &mut String) {}
}

/// The target of a result pointer.
pub trait Shown {
    /// Appends the value at `place`, which has been written. Omits values too long for a line.
    fn show(_place: *const Self, _line: &mut String) {}
}

fn number(value: u64, line: &mut String) {
    let window = try_gpu().map_or((0, 0), |gpu| gpu.window());
    let _ = match value {
        value if (window.0..window.1).contains(&value) => write!(line, "d+{:#x}", value - window.0),
        u64::MAX => write!(line, "-1"),
        value if value >> 40 != 0 => write!(line, "host"),
        value => write!(line, "{value}"),
    };
}

macro_rules! numbers {
    ($($ty:ty)*) => {$(
        impl Argument for $ty {
            fn passed(&self, line: &mut String) {
                number(*self as u64, line);
            }
        }

        impl Shown for $ty {
            fn show(place: *const Self, line: &mut String) {
                line.push(' ');
                // SAFETY: `place` is a result pointer that the function has just written through.
                number(unsafe { place.read_unaligned() } as u64, line);
            }
        }
    )*};
}

numbers! { u64 usize u32 i32 u16 u8 i64 }

impl<T: Shown> Argument for Out<T> {
    fn passed(&self, line: &mut String) {
        line.push_str(if self.raw().is_null() { "NULL" } else { "out" });
    }

    fn got(&self, line: &mut String) {
        if !self.raw().is_null() {
            T::show(self.raw(), line);
        }
    }
}

impl<T> Argument for In<T> {
    fn passed(&self, line: &mut String) {
        line.push_str("in");
    }
}

impl Argument for Text {
    fn passed(&self, line: &mut String) {
        line.push_str(self.get().ok().and_then(|text| text.to_str().ok()).unwrap_or("NULL"));
    }
}

impl<T: Copy> Argument for Option<T> {
    fn passed(&self, line: &mut String) {
        line.push_str(if self.is_some() { "function" } else { "NULL" });
    }
}

/// Structures passed by value.
macro_rules! by_value {
    ($($ty:ty)*) => {$(
        impl $crate::call_log::Argument for $ty {
            fn passed(&self, line: &mut String) {
                line.push_str("..");
            }
        }
    )*};
}

/// Results larger than a number.
macro_rules! large {
    ($($ty:ty)*) => {$(
        impl $crate::call_log::Shown for $ty {}
    )*};
}

by_value! { f32 f64 }
large! { SomeResult f32 [u8; 16] *const std::ffi::c_char }

pub(crate) use {by_value, large};
