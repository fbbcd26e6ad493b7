//! NVIDIA's headers, from wheels: pinned, downloaded once into target/.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::output;

/// Headers of a CUDA version.
pub struct Headers {
    /// The major version.
    pub version: u32,
    /// The folders of `cuda.h`, `cuda_runtime_api.h` and their includes.
    pub folders: Vec<PathBuf>,
}

/// The wheels: pip's names, and the folders of their headers. They contain no program of ours; for
/// x86-64, whose headers equal AArch64's.
const CUDA_12: (&str, &str) = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia/cuda_runtime/include");
const CUDA_13: (&str, &str) = ("nvidia-cuda-runtime==13.5.37", "nvidia/cu13/include");
/// `crt/host_defines.h`, which they include, and the profiler's headers. CUDA 12 has them in a
/// wheel of 40 MB; they are macros for the compilers, and three functions that have not changed.
const BESIDE: [(&str, &str); 2] = [
    ("nvidia-cuda-crt==13.5.37", "nvidia/cu13/include"),
    ("nvidia-cuda-profiler-api==13.5.25", "nvidia/cu13/include"),
];

/// Downloads all of them. Fails if pip fails.
pub fn get(root: &Path) -> Result<Vec<Headers>, String> {
    [(12, CUDA_12), (13, CUDA_13)]
        .into_iter()
        .map(|(version, wheel)| {
            let wheels = std::iter::once(wheel).chain(BESIDE);
            Ok(Headers {
                version,
                folders: wheels.map(|wheel| unpacked(root, wheel)).collect::<Result<_, _>>()?,
            })
        })
        .collect()
}

/// A pip in a virtual environment: the system's Python may lack it, or forbid its use.
fn pip(root: &Path) -> Result<Command, String> {
    let venv = root.join("target/cuda-headers/venv");
    let python = venv.join("bin/python");
    if !Command::new(&python)
        .args(["-m", "pip", "--version"])
        .output()
        .is_ok_and(|answer| answer.status.success())
    {
        output(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).map_err(
            |error| format!("python3 -m venv: {error} (Debian: apt install python3-venv)"),
        )?;
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "--disable-pip-version-check"]);
    Ok(pip)
}

/// The folder of a wheel's headers.
fn unpacked(root: &Path, (wheel, headers): (&str, &str)) -> Result<PathBuf, String> {
    let folder = root.join("target/cuda-headers").join(wheel.replace("==", "-"));
    let stamp = folder.join("complete");
    if !stamp.exists() {
        let _ = std::fs::remove_dir_all(&folder);
        let what = ["download", "--quiet", "--no-deps", "--retries", "2", "--only-binary=:all:"];
        output(
            pip(root)?
                .args(what)
                .args(["--platform", "manylinux2014_x86_64", "--dest"])
                .arg(&folder)
                .arg(wheel),
        )
        .map_err(|error| {
            format!("pip could not download {wheel}: {error}; a package index is needed once")
        })?;
        // A wheel is a zip file.
        let unpack = "import glob, sys, zipfile; zipfile.ZipFile(glob.glob(sys.argv[1] + \
                      '/*.whl')[0]).extractall(sys.argv[1])";
        output(Command::new("python3").args(["-c", unpack]).arg(&folder))?;
        std::fs::write(&stamp, "").map_err(|error| format!("{}: {error}", stamp.display()))?;
    }
    Ok(folder.join(headers))
}
