//! The file for node_exporter's textfile collector.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fs::{OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Puts `text` at `path` at once: a reader finds the whole of the old text or the whole of the new. Readable by all, as node_exporter is
/// another user.
///
/// # Errors
/// It can't be written.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failure = |error: std::io::Error| {
        Failure::new(format_args!(
            "--textfile {}: {error}; name a file in a folder that you may write to (node_exporter reads that of its \
             --collector.textfile.directory)",
            path.display()
        ))
    };
    if std::fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        return Err(Failure::new(format_args!(
            "{}: a pipe, a device or a folder, which would be replaced; name a file, or use --print",
            path.display()
        )));
    }
    // Not `*.prom`: the collector must not take it for one of its own.
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let beside: PathBuf = path.with_file_name(name);
    let write = || {
        // Left by one of our pid that was killed.
        let _ = std::fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&beside)?;
        // Whatever the umask: the collector runs as another user.
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())?;
        drop(file);
        std::fs::rename(&beside, path)
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&beside);
        failure(error)
    })
}
