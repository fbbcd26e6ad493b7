//! `cargo xtask shims`: builds the wheel's shims of the native door, before the release, from
//! torch's own wheels (python_loader/build_shims.py).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::succeed;

/// Folder of the build, and of the parts of torch's wheels that it needs.
const OUT: &str = "target/shims-prebuilt";
const WHEELS: &str = "target/torch-headers";

/// The newest supported version: the one that `pip install torch` installs, and that of the tests.
pub const NEWEST: &str = "2.15.0";

/// The oldest version with a shim. Continuous integration builds its shim, too: of the differences
/// between versions it has the most.
pub const OLDEST: &str = "2.11.0";

/// The shims to build.
#[derive(Debug, Default, Clone)]
pub struct Which {
    /// Machines; empty: this one.
    pub machines: Vec<String>,
    /// Versions of torch; empty: all listed ones.
    pub versions: Vec<String>,
    /// Folders with an installed torch, to be supported too, without a download.
    pub installed: Vec<PathBuf>,
}

/// Builds the shims; returns the folder.
pub fn make(root: &Path, which: &Which) -> Result<PathBuf, String> {
    let out = root.join(OUT);
    let mut python = Command::new("python3");
    python.arg(root.join("python_loader/build_shims.py"));
    python.arg("--out").arg(&out).arg("--wheels").arg(root.join(WHEELS));
    for machine in &which.machines {
        python.arg("--machine").arg(machine);
    }
    for folder in &which.installed {
        python.arg("--installed").arg(folder);
    }
    succeed(python.args(&which.versions))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::text;

    #[test]
    fn the_newest_is_the_last_that_is_listed_and_what_the_tests_run_with() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let list = text(&root.join("python_loader/shims.txt")).unwrap();
        let mut versions = list
            .lines()
            .filter_map(|line| line.strip_prefix("x86_64 "))
            .filter_map(|line| line.split(' ').next());
        assert_eq!((versions.next(), versions.next_back()), (Some(OLDEST), Some(NEWEST)));
        let plain = text(&root.join("tests/pytorch/plain")).unwrap();
        assert!(plain.contains(&format!("\"{NEWEST}\"")));
        let tests = text(&root.join("tests/pytorch/requirements.txt")).unwrap();
        assert!(tests.lines().any(|line| line == format!("torch=={NEWEST}")));
    }
}
