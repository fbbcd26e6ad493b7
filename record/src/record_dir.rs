//! `GRUYERE_RECORD_DIR`: where a process keeps its record, and where the `gruyere` command looks
//! for records.
//!
//! No key of `GRUYERE_CONF`: who reads is another process, which does not know with what the writer
//! was configured.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::ffi::OsString;
use std::path::PathBuf;

/// The environment variable with the folder.
pub const VARIABLE: &str = "GRUYERE_RECORD_DIR";

/// The folder where the variable is not set, or empty.
pub const DEFAULT: &str = "/dev/shm";

/// The folder. Where no file can be made in it, a record is kept as one without a name, and a
/// warning says so.
pub fn record_dir() -> PathBuf {
    folder(std::env::var_os(VARIABLE))
}

fn folder(value: Option<OsString>) -> PathBuf {
    let folder =
        value.filter(|value| !value.is_empty()).map_or_else(|| DEFAULT.into(), PathBuf::from);
    // A program may change its folder before it ends, when its record is to go.
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
