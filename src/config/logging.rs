//! `GRUYERE_LOG`: env_logger's filter, warnings by default.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::sync::Once;

/// The environment variable with the filter (`warn`, `debug`, `gruyere_heap=trace`, ...).
pub const VARIABLE: &str = "GRUYERE_LOG";

/// What a filter may name.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Starts logging to stderr. May be called any number of times, from any thread; keeps a logger
/// that the host program has set. Neither this nor a later log line panics: env_logger ignores a
/// stderr that is closed.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let filter = std::env::var(VARIABLE).unwrap_or_default();
        let unknown = unknown(&filter);
        let mut builder = env_logger::Builder::new();
        match unknown {
            None => builder.parse_env(env_logger::Env::new().filter_or(VARIABLE, "warn")),
            // env_logger would take a level that is misspelt for a module, and be silent.
            Some(_) => builder.parse_filters("warn"),
        };
        // The only error is that a logger is set already, which is the host's choice.
        let _ = builder.try_init();
        if let Some(word) = unknown {
            log::warn!(
                "{VARIABLE}={filter}: {word:?} is no level and no module of Gruyère's; \
                 expected {}, or a module and a level (gruyere_heap=debug). The level is warn",
                LEVELS.join(", ")
            );
        }
    });
}

/// The first part of a filter that is neither a level nor names a module of ours.
fn unknown(filter: &str) -> Option<&str> {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let is_known = |part: &&str| match part.split_once('=') {
        // Without a level: all of them.
        Some((_, level)) => level.trim().is_empty() || is_level(level.trim()),
        None => is_level(part) || part.starts_with("gruyere"),
    };
    // A pattern for the texts may follow.
    let parts = filter.split('/').next().unwrap_or_default().split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).find(|part| !is_known(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_found() {
        for filter in
            ["", "warn", "DEBUG", "info,gruyere_heap=trace", "gruyere::door", "warn/a,b", "h="]
        {
            assert_eq!(unknown(filter), None, "{filter}");
        }
        for (filter, word) in [
            ("warning", "warning"),
            ("wran", "wran"),
            ("info,gruyere=wran", "gruyere=wran"),
            ("2", "2"),
        ] {
            assert_eq!(unknown(filter), Some(word), "{filter}");
        }
    }
}
