//! `GRUYERE_LOG`: env_logger's filter, warnings by default.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::sync::Once;

/// The environment variable with the filter (`warn`, `debug`, `gruyere_heap=trace`, ...).
pub const VARIABLE: &str = "GRUYERE_LOG";

/// Starts logging to stderr. May be called any number of times, from any thread; keeps a logger
/// that the host program has set. Neither this nor a later log line panics: env_logger ignores a
/// stderr that is closed.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let environment = env_logger::Env::new().filter_or(VARIABLE, "warn");
        // The only error is that a logger is set already, which is the host's choice.
        let _ = env_logger::Builder::from_env(environment).try_init();
    });
}
