//! Location of libgruyere.so.
#![deny(unsafe_code)]

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::elf::{self, Kind};
use crate::failure::Failure;

/// Path of a library, as for the Python package.
pub const VARIABLE: &str = "GRUYERE_LIBRARY";
/// File name of the library.
pub const NAME: &str = "libgruyere.so";
/// File name of the library for calls of the driver.
pub const DRIVER_NAME: &str = "libgruyere_driver.so";

/// Symbols unique to the first and to the second.
const SYMBOL: &str = "gruyere_version";
const DRIVER_SYMBOL: &str = "cuGetProcAddress_v2";

/// The libraries to preload.
#[derive(Debug)]
pub struct Libraries {
    /// libgruyere.so.
    pub library: PathBuf,
    /// libgruyere_driver.so, where it is needed.
    pub driver: Option<PathBuf>,
}

/// Finds the libraries: `chosen`, else the environment's, else the installed one.
///
/// # Errors
/// The library is missing, or cannot be preloaded.
pub fn find(chosen: Option<&Path>, with_driver: bool) -> Result<Libraries, Failure> {
    let named = chosen.map(|path| (path.to_owned(), "--library".to_owned())).or_else(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        Some((PathBuf::from(path), VARIABLE.to_owned()))
    });
    let library = match named {
        Some((path, by)) if path.is_file() => usable(&path, &by, SYMBOL)?,
        Some((path, by)) => {
            return Err(Failure::new(format_args!(
                "{by} {}: no such file; it must name {NAME}",
                path.display()
            )));
        }
        None => {
            let places = places();
            let Some(found) = places.iter().find(|place| place.is_file()) else {
                let looked: Vec<String> =
                    places.iter().map(|place| place.display().to_string()).collect();
                return Err(Failure::new(format_args!(
                    "{NAME} was not found; looked for {}. Name it with --library or {VARIABLE}; \
                     `pip install ./python_loader` installs it beside this command, `cargo build \
                     --release` builds it (cargo install does not install libraries)",
                    looked.join(", ")
                )));
            };
            usable(found, "found", SYMBOL)?
        }
    };
    let driver = with_driver.then(|| beside(&library)).transpose()?;
    Ok(Libraries { library, driver })
}

/// `preload:driver` needs the second library, which is installed with the first.
fn beside(library: &Path) -> Result<PathBuf, Failure> {
    let file = library.with_file_name(DRIVER_NAME);
    // `cargo run` leaves the first in deps, and the second above.
    let above = library.parent().and_then(Path::parent).map(|folder| folder.join(DRIVER_NAME));
    let found = std::iter::once(file.clone()).chain(above).find(|file| file.is_file());
    let Some(found) = found else {
        return Err(Failure::new(format_args!(
            "{}: no such file; `preload:driver` needs it beside {NAME} (cargo build --release \
             --workspace builds both)",
            file.display()
        )));
    };
    usable(&found, "found", DRIVER_SYMBOL)
}

/// Places of an installation, nearest first.
fn places() -> Vec<PathBuf> {
    // The command may be a link in another folder.
    let executable = std::env::current_exe().ok();
    let Some(folder) = executable.as_deref().and_then(Path::parent) else { return Vec::new() };
    // `cargo run` leaves the library of a dependency in deps.
    let mut places = vec![folder.join(NAME), folder.join("deps").join(NAME)];
    let prefixes = folder.parent().map(Path::to_owned).into_iter();
    let active =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    for prefix in prefixes.chain(active) {
        places.push(prefix.join("lib").join(NAME));
        let found = packages(&prefix);
        if found.is_empty() {
            places.push(prefix.join("lib/python3*/site-packages/gruyere").join(NAME));
        }
        places.extend(found);
    }
    places.dedup();
    places
}

/// The Python package's libraries under a prefix.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let folders = site_packages(prefix).into_iter();
    folders.map(|folder| folder.join("gruyere").join(NAME)).filter(|file| file.is_file()).collect()
}

/// Where Python's packages may lie under a prefix; of several interpreters, the newest first.
pub fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut interpreters: Vec<(u32, PathBuf)> = ["lib", "lib64"]
        .into_iter()
        .filter_map(|folder| std::fs::read_dir(prefix.join(folder)).ok())
        .flat_map(|entries| entries.flatten())
        .filter_map(|entry| {
            // Debian's own packages are those of every minor version.
            let minor = match entry.file_name().to_str()?.strip_prefix("python3")? {
                "" => 0,
                minor => minor.strip_prefix('.')?.parse().ok()?,
            };
            Some((minor, entry.path()))
        })
        .collect();
    interpreters.sort_by_key(|(minor, _)| std::cmp::Reverse(*minor));
    let in_one = |(_, folder): (u32, PathBuf)| {
        ["site-packages", "dist-packages"].map(|kind| folder.join(kind))
    };
    interpreters.into_iter().flat_map(in_one).collect()
}

/// The absolute path, if a program can load the file.
fn usable(path: &Path, by: &str, symbol: &str) -> Result<PathBuf, Failure> {
    let name = path.display();
    let absolute = std::path::absolute(path)
        .map_err(|error| Failure::new(format_args!("{by} {name}: {error}; give its full path")))?;
    // The loader splits LD_PRELOAD at both, and knows no quotes.
    if absolute
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| matches!(byte, b' ' | b':' | b'\t' | b'\n'))
    {
        return Err(Failure::new(format_args!(
            "{by} {name}: LD_PRELOAD cannot hold a path with a space or a colon; put the library, \
             or a link to it, elsewhere, and name that path with --library"
        )));
    }
    match elf::kind(&absolute) {
        // A library has no loader of its own.
        Kind::NoLoader if elf::defines(&absolute, symbol) => Ok(absolute),
        Kind::NoLoader => Err(Failure::new(format_args!(
            "{by} {name}: this is not Gruyère's library (it has no {symbol}); name {NAME}"
        ))),
        Kind::Loaded(_) | Kind::NotElf => {
            Err(Failure::new(format_args!("{by} {name}: not a shared library; name {NAME}")))
        }
        Kind::Foreign => Err(Failure::new(format_args!(
            "{by} {name}: it is damaged, or built for another machine; name {NAME} of this one"
        ))),
    }
}
