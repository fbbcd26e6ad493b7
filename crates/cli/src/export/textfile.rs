//! The file for node_exporter's textfile collector.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::path::Path;

use gruyere_record::file;

use crate::failure::Failure;

/// Replaces `path` by `text` atomically: a reader finds the whole old text or the whole new text.
/// Readable by all, since node_exporter is another user.
///
/// # Errors
/// The file can't be written.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failure = |error: std::io::Error| {
        Failure::new(format_args!(
            "--textfile {}: {error}; name a file in a folder that you can write to (node_exporter \
             reads the folder of its --collector.textfile.directory)",
            path.display()
        ))
    };
    expect_replaceable(path)?;
    // Ignores the umask: the collector runs as another user.
    file::replace(path, u64::MAX, file::PUBLIC, |out| out.write_all(text.as_bytes()))
        .map_err(failure)
}

/// Checks that `path` is a regular file, or nothing yet.
///
/// # Errors
/// It is something else.
pub fn expect_replaceable(path: &Path) -> Result<(), Failure> {
    if std::fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        return Err(Failure::new(format_args!(
            "{}: this is a pipe, a device or a folder, and would be replaced; name a file, or use \
             --print",
            path.display()
        )));
    }
    Ok(())
}

/// Removes the file at the end.
pub fn remove(path: &Path) {
    // An error means that it is gone already, or was never written.
    let _ = std::fs::remove_file(path);
}
