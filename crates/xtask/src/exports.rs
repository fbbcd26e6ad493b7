//! Dynamic symbols of the shared libraries: their own names, exactly the functions that they
//! interpose, and a flag against unloading.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{cargo, output};

/// The functions of the CUDA runtime and of NCCL that the LD_PRELOAD door interposes: exactly
/// these, or programs are half served.
const INTERPOSED: [&str; 36] = [
    "cudaDeviceEnablePeerAccess",
    "cudaDeviceReset",
    "cudaDeviceSynchronize",
    "cudaFree",
    "cudaFreeAsync",
    "cudaFreeAsync_ptsz",
    "cudaGraphAddHostNode",
    "cudaIpcGetMemHandle",
    "cudaLaunchHostFunc",
    "cudaLaunchHostFunc_ptsz",
    "cudaLaunchHostFunc_v2",
    "cudaLaunchHostFunc_v2_ptsz",
    "cudaMalloc",
    "cudaMalloc3D",
    "cudaMallocAsync",
    "cudaMallocAsync_ptsz",
    "cudaMallocFromPoolAsync",
    "cudaMallocFromPoolAsync_ptsz",
    "cudaMallocPitch",
    "cudaMemGetInfo",
    "cudaMemPoolSetAccess",
    "cudaStreamAddCallback",
    "cudaStreamAddCallback_ptsz",
    "cudaStreamBeginCapture",
    "cudaStreamBeginCaptureToGraph",
    "cudaStreamBeginCaptureToGraph_ptsz",
    "cudaStreamBeginCapture_ptsz",
    "cudaStreamDestroy",
    "cudaStreamEndCapture",
    "cudaStreamEndCapture_ptsz",
    "cudaThreadExit",
    "cudaThreadSynchronize",
    "ncclCommInitAll",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
];

/// The functions that libgruyere_driver.so interposes: the driver's lookup functions, and those
/// that a program may link to. More would affect programs in ways unrelated to us.
const OF_THE_DRIVER: [&str; 48] = [
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxReset_v2",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuGraphAddBatchMemOpNode",
    "cuGraphAddHostNode",
    "cuIpcGetMemHandle",
    "cuLaunchHostFunc",
    "cuLaunchHostFunc_ptsz",
    "cuLaunchHostFunc_v2",
    "cuLaunchHostFunc_v2_ptsz",
    "cuMemAllocAsync",
    "cuMemAllocAsync_ptsz",
    "cuMemAllocFromPoolAsync",
    "cuMemAllocFromPoolAsync_ptsz",
    "cuMemAllocPitch_v2",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeAsync",
    "cuMemFreeAsync_ptsz",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemMap",
    "cuMemPoolSetAccess",
    "cuMemRelease",
    "cuMemUnmap",
    "cuStreamAddCallback",
    "cuStreamAddCallback_ptsz",
    "cuStreamBatchMemOp",
    "cuStreamBatchMemOp_ptsz",
    "cuStreamBatchMemOp_v2",
    "cuStreamBatchMemOp_v2_ptsz",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginCaptureToGraph_ptsz",
    "cuStreamBeginCapture_v2",
    "cuStreamBeginCapture_v2_ptsz",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamEndCapture_ptsz",
    "cuStreamWaitValue32",
    "cuStreamWaitValue32_ptsz",
    "cuStreamWaitValue32_v2",
    "cuStreamWaitValue32_v2_ptsz",
    "cuStreamWaitValue64",
    "cuStreamWaitValue64_ptsz",
    "cuStreamWaitValue64_v2",
    "cuStreamWaitValue64_v2_ptsz",
    "dlsym",
];

/// A shared library of ours.
struct Library {
    package: &'static str,
    file: &'static str,
    /// Prefix of its own names, if any.
    own: Option<&'static str>,
    /// The functions it interposes: exactly these, or programs are half served.
    interposed: &'static [&'static str],
}

/// Checks fresh builds of the libraries.
pub fn check(root: &Path) -> Result<(), String> {
    let library = Library {
        package: "gruyere",
        file: "libgruyere.so",
        own: Some("gruyere_"),
        interposed: &INTERPOSED,
    };
    let driver = Library {
        package: "gruyere-preload",
        file: "libgruyere_driver.so",
        own: None,
        interposed: &OF_THE_DRIVER,
    };
    library.check(root)?;
    driver.check(root)
}

impl Library {
    fn check(&self, root: &Path) -> Result<(), String> {
        let library = self.build(root)?;
        let symbols = output(
            Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library),
        )?;
        let names: Vec<_> =
            symbols.lines().filter_map(|line| line.split_whitespace().next()).collect();
        if names.is_empty() {
            return Err(format!("{} exports nothing", library.display()));
        }
        let is_own = |name: &str| self.own.is_some_and(|start| name.starts_with(start));
        let is_known = |name: &str| is_own(name) || self.interposed.contains(&name);
        let foreign: Vec<_> = names.iter().filter(|name| !is_known(name)).copied().collect();
        if !foreign.is_empty() {
            return Err(format!(
                "{} exports names that are not its own: {}",
                library.display(),
                foreign.join(", ")
            ));
        }
        let missing: Vec<_> =
            self.interposed.iter().filter(|name| !names.contains(name)).copied().collect();
        if !missing.is_empty() {
            return Err(format!("{} does not interpose {}", library.display(), missing.join(", ")));
        }
        // The host's threads and exit handlers may still be inside during a dlclose.
        let dynamic = output(Command::new("readelf").arg("-d").arg(&library))?;
        if !dynamic.contains("NODELETE") {
            return Err(format!("{} is not linked with -z nodelete", library.display()));
        }
        // The library loads on a machine without a driver because cudarc loads it dynamically.
        if let Some(line) =
            dynamic.lines().find(|line| line.contains("NEEDED") && line.contains("libcu"))
        {
            return Err(format!("{} is linked to CUDA: {}", library.display(), line.trim()));
        }
        println!(
            "{} exports {} functions, {} of them interposed",
            library.display(),
            names.len(),
            self.interposed.len()
        );
        Ok(())
    }

    /// Builds the library and returns cargo's path to it.
    fn build(&self, root: &Path) -> Result<PathBuf, String> {
        let messages = output(&mut cargo(
            root,
            &["build", "--package", self.package, "--lib", "--message-format=json"],
        ))?;
        let ending = format!("/{}", self.file);
        // A JSON object per line; file names need no unescaping unless they contain quotes or
        // backslashes.
        let file = messages
            .lines()
            .filter(|line| line.contains("\"reason\":\"compiler-artifact\""))
            .flat_map(|line| line.split('"'))
            .find(|word| word.ends_with(&ending));
        file.map(PathBuf::from).ok_or_else(|| format!("cargo built no {}", self.file))
    }
}
