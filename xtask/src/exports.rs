//! What the shared library shows to the dynamic linker: its own names and no others, and that it is never unloaded.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{cargo, output};

/// Checks a fresh build of the library.
pub fn check(root: &Path) -> Result<(), String> {
    let library = build(root)?;
    let symbols = output(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library))?;
    let names: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().next()).collect();
    if names.is_empty() {
        return Err(format!("{} exports nothing", library.display()));
    }
    let foreign: Vec<_> = names.iter().filter(|name| !name.starts_with("gruyere_")).copied().collect();
    if !foreign.is_empty() {
        return Err(format!(
            "{} exports names that are not its own: {}",
            library.display(),
            foreign.join(", ")
        ));
    }
    // Threads and exit handlers of the host may still be inside when somebody calls dlclose.
    let dynamic = output(Command::new("readelf").arg("-d").arg(&library))?;
    if !dynamic.contains("NODELETE") {
        return Err(format!("{} is not linked with -z nodelete", library.display()));
    }
    // cudarc's dynamic loading is why the library loads on a machine without a driver.
    if let Some(line) = dynamic.lines().find(|line| line.contains("NEEDED") && line.contains("libcu")) {
        return Err(format!("{} is linked to CUDA: {}", library.display(), line.trim()));
    }
    println!("{} exports {} functions, all of them gruyere_*", library.display(), names.len());
    Ok(())
}

/// Builds libgruyere.so and tells where cargo put it.
fn build(root: &Path) -> Result<PathBuf, String> {
    let messages =
        output(&mut cargo(root, &["build", "--package", "gruyere", "--lib", "--message-format=json"]))?;
    // One JSON object a line; file names need no unescaping unless they hold quotes or backslashes.
    let file = messages
        .lines()
        .filter(|line| line.contains("\"reason\":\"compiler-artifact\""))
        .flat_map(|line| line.split('"'))
        .find(|word| word.ends_with("/libgruyere.so"));
    file.map(PathBuf::from).ok_or_else(|| "cargo built no libgruyere.so".into())
}
