//! Entry and exit of every exported function: counted, logged, guarded, with a code as result.

use crate::abi::{Answer, Counter, code};
use crate::process::{self, Phase};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The library of a function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// libcuda: needs `cuInit` first. The books count its caller as the allocator.
    Driver,
    /// libcuda, and allowed before `cuInit`.
    DriverEarly,
    /// libcudart: initialises itself, and remembers the thread's last error. Its caller is the
    /// program.
    Runtime,
}

thread_local! {
    static LAST_ERROR: Cell<u32> = const { Cell::new(0) };
}

/// The thread's last runtime error; `take` resets it, as `cudaGetLastError` does.
pub fn last_error(take: bool) -> u32 {
    if take { LAST_ERROR.replace(0) } else { LAST_ERROR.get() }
}

/// Runs the body of an exported function. Nothing unwinds out of it.
pub fn entry(counter: &'static Counter, face: Face, body: impl FnOnce() -> Answer) -> u32 {
    counter.hit();
    let code = match process::phase() {
        Phase::ForkedChild => {
            process::count_forked_call();
            code::NOT_INITIALIZED
        }
        Phase::Gone => code::DEINITIALIZED,
        Phase::Fresh if face == Face::Driver => code::NOT_INITIALIZED,
        phase => {
            if phase == Phase::Fresh && face == Face::Runtime {
                process::initialize();
            }
            let answer = catch_unwind(AssertUnwindSafe(|| match face {
                Face::Runtime => gruyere_phantom::as_program(body),
                _ => body(),
            }));
            answer.map_or(code::UNKNOWN, |answer| answer.err().unwrap_or(0))
        }
    };
    if face == Face::Runtime && code != 0 {
        LAST_ERROR.set(code);
    }
    code
}

/// Exports functions of the library `$face`.
macro_rules! exported {
    (
        $face:ident
        $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*
    ) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> u32 {
            static CALLS: $crate::abi::Counter = $crate::abi::Counter::new(stringify!($name));
            let line = $crate::call_log::begin(stringify!($name), |_line| {
                $($crate::call_log::Argument::passed(&$arg, _line); _line.push_str(", ");)*
            });
            let code = $crate::entry::entry(&CALLS, $crate::entry::Face::$face, move || $body);
            if let Some(line) = line {
                line.end(code, |_line| { $($crate::call_log::Argument::got(&$arg, _line);)* });
            }
            code
        }
    )*};
}

/// Exports functions of libcuda.
macro_rules! driver {
    ($($all:tt)*) => { $crate::entry::exported! { Driver $($all)* } };
}

/// Exports functions of libcuda that work before `cuInit`.
macro_rules! driver_early {
    ($($all:tt)*) => { $crate::entry::exported! { DriverEarly $($all)* } };
}

/// Exports functions of libcudart.
macro_rules! runtime {
    ($($all:tt)*) => { $crate::entry::exported! { Runtime $($all)* } };
}

/// Exports functions that only count the call and return success: in the C ABI of x86-64 and
/// AArch64 the caller owns the arguments, so a callee may ignore them.
macro_rules! succeeds {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u32 {
            static CALLS: $crate::abi::Counter = $crate::abi::Counter::new(stringify!($name));
            CALLS.hit();
            0
        }
    )*};
}

pub(crate) use {driver, driver_early, exported, runtime, succeeds};
