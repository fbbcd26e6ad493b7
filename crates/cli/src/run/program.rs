//! Whether the loader will load a library into a program, as far as it is known before the start.

use std::ffi::{CString, OsStr};
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::elf::{self, Kind};

/// Result of the check.
#[derive(Debug, PartialEq, Eq)]
pub enum Finding {
    /// No obstacle.
    Fine,
    /// This program will not load the library; programs that it starts may.
    Doubtful(String),
    /// It cannot work, for this program and all that it starts.
    Impossible(String),
}

/// Examines `program`, as execvp would find it, and the interpreter of a script.
pub fn examine(program: &OsStr) -> Finding {
    // A missing program fails with its own message when executed.
    let Some(path) = find(program) else { return Finding::Fine };
    match interpreter(&path) {
        Some(interpreter) => match of_file(&interpreter) {
            Finding::Fine => Finding::Fine,
            Finding::Doubtful(reason) => {
                Finding::Doubtful(format!("{} is a script for {reason}", path.display()))
            }
            Finding::Impossible(reason) => {
                Finding::Impossible(format!("{} is a script for {reason}", path.display()))
            }
        },
        None => of_file(&path),
    }
}

fn of_file(path: &Path) -> Finding {
    let name = path.display();
    if let Some(right) = privilege(path) {
        return Finding::Impossible(format!(
            "{name}: it is {right}, so the loader removes LD_PRELOAD from its environment; use \
             gruyere run inside it, as in `sudo gruyere run -- program`"
        ));
    }
    match elf::kind(path) {
        Kind::NoLoader => Finding::Doubtful(format!(
            "{name}: it is linked statically, so LD_PRELOAD has no effect on it: Gruyère will see \
             none of its own calls, only those of programs that it starts; link it dynamically"
        )),
        Kind::Loaded(loader) if loader.contains("ld-musl") => Finding::Impossible(format!(
            "{name}: it is built for musl ({loader}), but libgruyere.so and the CUDA driver are \
             built for glibc; build it for glibc"
        )),
        Kind::Foreign => Finding::Doubtful(format!(
            "{name}: it is built for another machine than libgruyere.so, so its loader will not \
             load the library"
        )),
        Kind::Loaded(_) | Kind::NotElf => Finding::Fine,
    }
}

/// The file that execvp would execute.
pub fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

/// The interpreter in a script's first line.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    // The kernel cuts longer lines too (BINPRM_BUF_SIZE).
    std::fs::File::open(script).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let word = line.trim_ascii().split(|byte| byte.is_ascii_whitespace()).next()?;
    (!word.is_empty()).then(|| PathBuf::from(std::ffi::OsString::from_vec(word.to_vec())))
}

/// Privileges that this file would add to ours: with them, the loader ignores the environment.
fn privilege(path: &Path) -> Option<&'static str> {
    let facts = path.metadata().ok()?;
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: a NUL-terminated name; all-zero is a valid value, which the call writes; the
    // attribute is queried without a buffer for its value.
    let (without_rights, user, group, has_capabilities) = unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        let known = libc::statvfs(name.as_ptr(), &mut system) == 0;
        let attribute = c"security.capability".as_ptr();
        let bytes = libc::getxattr(name.as_ptr(), attribute, std::ptr::null_mut(), 0);
        (known && system.f_flag & libc::ST_NOSUID != 0, libc::getuid(), libc::getgid(), bytes > 0)
    };
    if without_rights {
        return None;
    }
    let (owner, owners) = (facts.uid(), facts.gid());
    privilege_of(facts.mode(), (owner, owners), (user, group), has_capabilities)
}

/// Privileges by mode and owner, for a user.
fn privilege_of(
    mode: u32,
    (owner, owners): (u32, u32),
    (user, group): (u32, u32),
    has_capabilities: bool,
) -> Option<&'static str> {
    if mode & libc::S_ISUID != 0 && owner != user {
        Some("setuid")
    } else if mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0 && owners != group {
        Some("setgid")
    } else if has_capabilities && user != 0 {
        Some("given file capabilities")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_beyond_the_users_own_are_named() {
        let (me, root) = ((1000, 1000), (0, 0));
        assert_eq!(privilege_of(0o104_755, root, me, false), Some("setuid"));
        assert_eq!(privilege_of(0o104_755, root, root, false), None, "root gains nothing");
        assert_eq!(privilege_of(0o102_755, root, me, false), Some("setgid"));
        assert_eq!(privilege_of(0o102_745, root, me, false), None, "that is a lock's mark");
        assert_eq!(privilege_of(0o100_755, root, me, true), Some("given file capabilities"));
        assert_eq!(privilege_of(0o100_755, root, root, true), None);
        assert_eq!(privilege_of(0o100_755, root, me, false), None);
    }

    #[test]
    fn the_interpreter_of_a_script_is_what_its_first_line_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("script");
        for (text, expected) in [
            ("#!/usr/bin/env python3\nx", Some("/usr/bin/env")),
            ("#! /bin/sh -e", Some("/bin/sh")),
            ("#!\n/bin/sh", None),
            ("/bin/sh", None),
            ("", None),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(interpreter(&file), expected.map(PathBuf::from), "{text:?}");
        }
    }
}
