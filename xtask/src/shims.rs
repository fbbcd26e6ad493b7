//! `cargo xtask shims`: the native door's shims that a wheel brings, built before the release from
//! torch's own wheels (python_loader/build_shims.py).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::succeed;

/// Where they are built, and where the parts of torch's wheels are kept that they are built from.
const OUT: &str = "target/shims-prebuilt";
const WHEELS: &str = "target/torch-headers";

/// Builds those for these versions of torch, or for all that are listed; the folder.
pub fn make(root: &Path, versions: &[String]) -> Result<PathBuf, String> {
    let out = root.join(OUT);
    let mut python = Command::new("python3");
    python.arg(root.join("python_loader/build_shims.py"));
    python.arg("--out").arg(&out).arg("--wheels").arg(root.join(WHEELS)).args(versions);
    succeed(&mut python)?;
    Ok(out)
}
