//! Whether a Python interpreter can import torch, by its folders: nothing is run.
#![deny(unsafe_code)]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::library::site_packages;
use super::program;

/// Whether torch lies where `interpreter` (a command's first word) looks for packages. A package in
/// an unusual place is not found, and one of another version of Python is.
pub fn is_installed_for(interpreter: &OsStr) -> bool {
    let named = program::find(interpreter);
    // An environment's interpreter is a link to that of the system, whose packages it may see.
    let real = named.as_ref().and_then(|path| path.canonicalize().ok());
    let prefixes = named.iter().chain(&real).filter_map(|path| path.parent()?.parent());
    let own = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
    let local = Path::new("/usr/local");
    let paths = std::env::var_os("PYTHONPATH").unwrap_or_default();
    prefixes.chain(own.as_deref()).chain([local]).any(has_torch)
        || std::env::split_paths(&paths).any(|folder| folder.join("torch").is_dir())
}

/// Whether torch is installed for a Python of this prefix.
fn has_torch(prefix: &Path) -> bool {
    site_packages(prefix).iter().any(|folder| folder.join("torch").is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torch_is_found_in_the_environment_of_the_interpreter_alone() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::write(bin.join("python"), "").unwrap();
        assert!(!has_torch(folder.path()));
        let packages = folder.path().join("lib/python3.12/site-packages");
        std::fs::create_dir_all(packages.join("torchvision")).unwrap();
        assert!(!has_torch(folder.path()));
        std::fs::create_dir_all(packages.join("torch")).unwrap();
        assert!(is_installed_for(bin.join("python").as_os_str()));
    }
}
