//! `cargo xtask shims`: the native door's shims that a wheel brings, built before the release from
//! torch's own wheels (python_loader/build_shims.py).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::succeed;

/// Where they are built, and where the parts of torch's wheels are kept that they are built from.
const OUT: &str = "target/shims-prebuilt";
const WHEELS: &str = "target/torch-headers";

/// The newest version that is served: what `pip install torch` gives, and what continuous
/// integration builds a shim for besides that of the tests' torch.
pub const NEWEST: &str = "2.15.0";

/// Which of them.
#[derive(Debug, Default, Clone)]
pub struct Which {
    /// For these machines; this one, where none is named.
    pub machines: Vec<String>,
    /// For these versions of torch; all that are listed, where none is named.
    pub versions: Vec<String>,
    /// For the torch that is installed in these folders too, which needs no download.
    pub installed: Vec<PathBuf>,
}

/// Builds them; the folder.
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
    fn the_newest_is_the_last_that_is_listed_and_what_a_plain_installation_is_tried_with() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let list = text(&root.join("python_loader/shims.txt")).unwrap();
        let mut versions = list
            .lines()
            .filter_map(|line| line.strip_prefix("x86_64 "))
            .filter_map(|line| line.split(' ').next());
        assert_eq!(versions.next_back(), Some(NEWEST));
        let plain = text(&root.join("tests/pytorch/plain")).unwrap();
        assert!(plain.contains(&format!("\"{NEWEST}\"")));
    }
}
