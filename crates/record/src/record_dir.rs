//! `GRUYERE_RECORD_DIR`: the folder where processes keep their records and the `gruyere` command
//! looks for them.
//!
//! No key of `GRUYERE_CONF`: the reader is another process, which does not know the writer's
//! configuration.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::ffi::OsString;
use std::path::PathBuf;

/// The environment variable with the folder.
pub const VARIABLE: &str = "GRUYERE_RECORD_DIR";

/// The folder if the variable is unset or empty.
pub const DEFAULT: &str = "/dev/shm";

/// The folder. If no file can be made in it, the record is a memfd, and a warning says so.
pub fn record_dir() -> PathBuf {
    folder(std::env::var_os(VARIABLE))
}

fn folder(value: Option<OsString>) -> PathBuf {
    let folder =
        value.filter(|value| !value.is_empty()).map_or_else(|| DEFAULT.into(), PathBuf::from);
    // A program may change its folder before its end, when its record is removed.
    std::path::absolute(&folder).unwrap_or(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_is_one_that_is_not_set() {
        assert_eq!(folder(None), PathBuf::from("/dev/shm"));
        assert_eq!(folder(Some("".into())), PathBuf::from("/dev/shm"));
        assert_eq!(folder(Some("/srv/records".into())), PathBuf::from("/srv/records"));
        assert_eq!(
            folder(Some("records".into())),
            std::env::current_dir().unwrap_or_default().join("records")
        );
    }
}
