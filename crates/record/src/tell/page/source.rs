//! A few lines of the program's source, if the file can be read and is the one that ran.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::Serialize;

use crate::plain;

/// The longest file read, bytes.
const MOST_BYTES: u64 = 2 << 20;
/// Characters of a line.
const MOST_CHARACTERS: usize = 160;

/// Lines of a file.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Excerpt {
    /// The file, as it was opened.
    path: String,
    /// Number of the first line.
    first: u32,
    /// Number of the wanted line.
    line: u32,
    lines: Vec<String>,
}

/// `line` of `path`, with `around` lines before and after. `None`: the file or line is missing; it
/// is no Python source (a record may name any file, and a page is shared); or it was changed after
/// `began` (nanoseconds since 1970), so that its lines may differ.
pub fn excerpt(path: &str, line: u32, around: usize, began: Option<u64>) -> Option<Excerpt> {
    let shown = Path::new(path);
    if shown.extension()? != "py" {
        return None;
    }
    // A pipe of that name must not block.
    let open = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(shown);
    let mut file = open.ok()?;
    let about = file.metadata().ok()?;
    let changed = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    if !about.is_file()
        || about.len() > MOST_BYTES
        || began.is_some_and(|began| changed > u128::from(began))
    {
        return None;
    }
    let mut bytes = Vec::new();
    file.by_ref().take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let meant = (line as usize).checked_sub(1)?;
    let first = meant.saturating_sub(around);
    let cut = |line: &str| -> String {
        let line = line.replace('\t', "    ");
        plain(line.trim_end()).chars().take(MOST_CHARACTERS).collect()
    };
    let lines: Vec<String> =
        text.lines().skip(first).take(meant - first + 1 + around).map(cut).collect();
    lines.get(meant - first)?;
    Some(Excerpt { path: plain(path), first: first as u32 + 1, line, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_around_one_are_told_and_those_of_a_file_that_changed_or_is_no_source_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let text: String = (1..=9).map(|n| format!("line {n}\n")).collect();
        for name in ["train.py", "passwd"] {
            std::fs::write(at(name), &text).unwrap();
        }
        let found = excerpt(&at("train.py"), 5, 2, None).unwrap();
        assert_eq!((found.first, found.line, found.lines.len()), (3, 5, 5));
        assert_eq!(found.lines[2], "line 5");
        assert_eq!(excerpt(&at("train.py"), 1, 2, None).unwrap().lines.len(), 3);
        assert_eq!(excerpt(&at("train.py"), 5, 2, Some(1)), None);
        for (name, line) in [("passwd", 5), ("train.py", 10), ("train.py", 0), ("none.py", 1)] {
            assert_eq!(excerpt(&at(name), line, 2, None), None, "{name}:{line}");
        }
    }

    #[test]
    fn neither_a_pipe_nor_a_folder_nor_a_long_file_is_waited_for_or_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        assert!(
            std::process::Command::new("mkfifo").arg(at("pipe.py")).status().unwrap().success()
        );
        std::fs::create_dir(at("folder.py")).unwrap();
        std::fs::write(at("long.py"), vec![b'\n'; MOST_BYTES as usize + 1]).unwrap();
        for name in ["pipe.py", "folder.py", "long.py"] {
            assert_eq!(excerpt(&at(name), 1, 2, None), None, "{name}");
        }
    }
}
