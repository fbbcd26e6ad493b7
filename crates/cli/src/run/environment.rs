//! The program's environment.
#![deny(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use gruyere::config::{Config, VARIABLE};
use gruyere::door::run_file::TEMPORARY;
use gruyere_record::facts::{Process, RUN_VARIABLE};
use gruyere_record::file;
use tempfile::TempDir;

use super::library::{DRIVER_NAME, Libraries, NAME};
use crate::failure::{Failure, say};

/// Bytes of the file that shows whether a run can be kept.
const PROBE: usize = 64 << 10;
/// The loader's variable.
const PRELOAD: &str = "LD_PRELOAD";

/// Requests of the command line.
pub struct Wanted<'a> {
    pub observe: bool,
    pub manage: bool,
    pub conf: &'a [String],
    /// Whether a summary will follow.
    pub keeps_runs: bool,
}

/// The variables to set, and the resources that must live as long.
pub struct Environment {
    config: Config,
    run: u64,
    /// Folder of the runs if the user keeps none.
    own_history: Option<TempDir>,
    variables: Vec<(OsString, OsString)>,
}

impl Environment {
    /// Merges the settings: the environment's, then those of the command line.
    ///
    /// # Errors
    /// Invalid settings, in the library's words.
    pub fn new(wanted: &Wanted<'_>) -> Result<Environment, Failure> {
        let inherited = match std::env::var(VARIABLE) {
            Ok(text) => text,
            Err(std::env::VarError::NotPresent) => String::new(),
            Err(std::env::VarError::NotUnicode(_)) => {
                Config::from_env().map_err(Failure::new)?;
                String::new()
            }
        };
        // Each by itself, so that an error names the one to mend.
        Config::parse(&inherited).map_err(Failure::new)?;
        for given in wanted.conf {
            Config::parse(given).map_err(|error| Failure::new(error.in_source("--conf")))?;
        }
        let given =
            std::iter::once(inherited.as_str()).chain(wanted.conf.iter().map(String::as_str));
        let mut conf = given.filter(|text| !text.trim().is_empty()).collect::<Vec<_>>().join(",");
        let mut config = Config::parse(&conf).map_err(Failure::new)?;
        let mode = match (wanted.observe, wanted.manage) {
            (true, _) => Some("observe"),
            (_, true) => Some("manage"),
            _ => None,
        };
        let driver = if config.preload.driver { "+driver" } else { "" };
        let mut add = |entry: String| {
            let separator = if conf.is_empty() { "" } else { "," };
            conf = format!("{conf}{separator}{entry}");
        };
        if let Some(mode) = mode {
            add(format!("preload:{mode}{driver}"));
        }
        let own_history = match wanted.keeps_runs && config.history.is_none() && config.heap.record
        {
            true => own_history(),
            false => None,
        };
        if let Some(folder) = &own_history {
            add(format!("history:{}", folder.path().display()));
        }
        config = Config::parse(&conf).map_err(Failure::new)?;
        // The program may change its folder before it writes there.
        if let Some(folder) = config.history.as_mut()
            && folder.is_relative()
        {
            let absolute = std::path::absolute(&*folder).map_err(|error| {
                Failure::new(format_args!(
                    "history:{}: {error}; give the full path",
                    folder.display()
                ))
            })?;
            conf = format!("{conf},history:{}", absolute.display());
            *folder = absolute;
        }
        // Below 2^53, so that every JSON reader keeps it exact.
        let fresh = || std::collections::hash_map::RandomState::new().build_hasher().finish() >> 11;
        // Within another run, its processes belong to that run too, whose summary covers them all.
        let run = Process::current().run.unwrap_or_else(fresh);
        let variables =
            vec![(VARIABLE.into(), conf.into()), (RUN_VARIABLE.into(), run.to_string().into())];
        Ok(Environment { config, run, own_history, variables })
    }

    /// Whether the settings ask for calls of the driver.
    pub fn needs_driver_library(&self) -> bool {
        self.config.preload.driver
    }

    /// Adds the libraries to LD_PRELOAD.
    pub fn preload(&mut self, libraries: &Libraries) {
        let before = std::env::var_os(PRELOAD).unwrap_or_default();
        self.variables.push((PRELOAD.into(), preloaded(&before, libraries)));
    }

    /// The variables to set.
    pub fn variables(&self) -> &[(OsString, OsString)] {
        &self.variables
    }

    /// The run number in the processes' records.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// The processes' configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Folder of their runs.
    pub fn history(&self) -> Option<&Path> {
        self.config.history.as_deref()
    }

    /// Why a process that ends cleanly can't leave its run: no file of its size can be written. A
    /// run is of kilobytes.
    pub fn history_fault(&self) -> Option<(PathBuf, io::Error)> {
        // A process makes the user's folder only when it has a run to leave.
        let folder = self.history()?.ancestors().find(|folder| folder.is_dir())?;
        let probe = folder.join(format!("{TEMPORARY}probe-{}", std::process::id()));
        let written = file::replace(&probe, u64::MAX, file::PRIVATE, |out| {
            out.write_all(&[0; PROBE])?;
            out.flush()
        });
        let _ = std::fs::remove_file(&probe);
        written.err().map(|error| (folder.to_owned(), error))
    }

    /// Keeps our own folder, which processes may still write to; returns its path.
    pub fn leave_history(&mut self) -> Option<PathBuf> {
        self.own_history.take().map(TempDir::keep)
    }
}

/// A folder for the runs if the user keeps none.
fn own_history() -> Option<TempDir> {
    let usual = std::env::temp_dir();
    // A comma ends an entry of the configuration.
    let folder =
        if usual.as_os_str().as_bytes().contains(&b',') { Path::new("/tmp") } else { &usual };
    let private = std::fs::Permissions::from_mode(0o700);
    match tempfile::Builder::new().prefix(TEMPORARY).permissions(private).tempdir_in(folder) {
        Ok(made) => Some(made),
        Err(error) => {
            let folder = folder.display();
            say(
                "run",
                format_args!(
                    "{folder}: {error}; the summary will lack processes that exit cleanly: set \
                     TMPDIR"
                ),
            );
            None
        }
    }
}

/// LD_PRELOAD with our libraries: in front of the others, so that no other library gets a call
/// before us; but behind a sanitizer's runtime, which must be first.
fn preloaded(before: &OsStr, libraries: &Libraries) -> OsString {
    let is_separator = |byte: &u8| matches!(byte, b':' | b' ' | b'\t' | b'\n');
    let words = before.as_bytes().split(is_separator).filter(|word| !word.is_empty());
    let file = |word: &[u8]| word.rsplit(|&byte| byte == b'/').next().unwrap_or(word).to_vec();
    let others = words
        .filter(|word| ![NAME.as_bytes(), DRIVER_NAME.as_bytes()].contains(&file(word).as_slice()));
    let (sanitizers, others): (Vec<&[u8]>, Vec<&[u8]>) =
        others.partition(|word| is_sanitizer(&file(word)));
    let ours =
        libraries.driver.iter().chain([&libraries.library]).map(|path| path.as_os_str().as_bytes());
    let all: Vec<&[u8]> = sanitizers.into_iter().chain(ours).chain(others).collect();
    OsString::from_vec(all.join(&b':'))
}

fn is_sanitizer(file: &[u8]) -> bool {
    let starts = [
        b"libasan".as_slice(),
        b"libtsan",
        b"libmsan",
        b"libubsan",
        b"liblsan",
        b"libhwasan",
        b"libclang_rt.",
    ];
    starts.iter().any(|start| file.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(before: &str, driver: bool) -> String {
        let libraries = Libraries {
            library: "/x/libgruyere.so".into(),
            driver: driver.then(|| "/x/libgruyere_driver.so".into()),
        };
        preloaded(OsStr::new(before), &libraries).into_string().unwrap()
    }

    #[test]
    fn what_is_preloaded_stays_behind_us_and_a_sanitizer_before_us() {
        assert_eq!(set("", false), "/x/libgruyere.so");
        assert_eq!(set("", true), "/x/libgruyere_driver.so:/x/libgruyere.so");
        assert_eq!(set("libfoo.so /a/libbar.so", false), "/x/libgruyere.so:libfoo.so:/a/libbar.so");
        assert_eq!(
            set("/l/libfoo.so:/usr/lib/libasan.so.8", false),
            "/usr/lib/libasan.so.8:/x/libgruyere.so:/l/libfoo.so"
        );
        let nested = "/y/libgruyere_driver.so:/y/libgruyere.so:libfoo.so";
        assert_eq!(
            set(nested, false),
            "/x/libgruyere.so:libfoo.so",
            "of two, the loader would take both"
        );
    }
}
