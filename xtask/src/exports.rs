//! What the shared library shows to the dynamic linker: its own names, the calls of CUDA's runtime that it stands in for and no others, and that
//! it is never unloaded.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{cargo, output};

/// The CUDA runtime's functions that the LD_PRELOAD door interposes: every one, and nothing else, or programs are half served.
const INTERPOSED: [&str; 23] = [
    "cudaDeviceReset",
    "cudaDeviceSynchronize",
    "cudaFree",
    "cudaFreeAsync",
    "cudaFreeAsync_ptsz",
    "cudaIpcGetMemHandle",
    "cudaMalloc",
    "cudaMalloc3D",
    "cudaMallocAsync",
    "cudaMallocAsync_ptsz",
    "cudaMallocFromPoolAsync",
    "cudaMallocFromPoolAsync_ptsz",
    "cudaMallocPitch",
    "cudaMemGetInfo",
    "cudaStreamBeginCapture",
    "cudaStreamBeginCaptureToGraph",
    "cudaStreamBeginCaptureToGraph_ptsz",
    "cudaStreamBeginCapture_ptsz",
    "cudaStreamDestroy",
    "cudaStreamEndCapture",
    "cudaStreamEndCapture_ptsz",
    "cudaThreadExit",
    "cudaThreadSynchronize",
];

/// Checks a fresh build of the library.
pub fn check(root: &Path) -> Result<(), String> {
    let library = build(root)?;
    let symbols = output(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library))?;
    let names: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().next()).collect();
    if names.is_empty() {
        return Err(format!("{} exports nothing", library.display()));
    }
    let is_known = |name: &str| name.starts_with("gruyere_") || INTERPOSED.contains(&name);
    let foreign: Vec<_> = names.iter().filter(|name| !is_known(name)).copied().collect();
    if !foreign.is_empty() {
        return Err(format!(
            "{} exports names that are not its own: {}",
            library.display(),
            foreign.join(", ")
        ));
    }
    let missing: Vec<_> = INTERPOSED.iter().filter(|name| !names.contains(name)).copied().collect();
    if !missing.is_empty() {
        return Err(format!("{} does not interpose {}", library.display(), missing.join(", ")));
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
    println!(
        "{} exports {} functions: gruyere_*, and the {} calls of CUDA's runtime that it interposes",
        library.display(),
        names.len(),
        INTERPOSED.len()
    );
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
