"""The build hook: builds the Rust parts with cargo, that is the libraries (package data) and the
`gruyere` command (a script of the wheel).

Environment:

- `CARGO_TARGET_DIR`, `RUSTFLAGS` and other variables of cargo apply.
- `GRUYERE_WHEEL_TARGET=aarch64-unknown-linux-gnu.2.28` builds for another machine, or for an older
  glibc than this machine's, with cargo-zigbuild (which is then a build requirement). Without it the
  wheel is for this machine, and its tag gives the glibc that it needs.
- `GRUYERE_WHEEL_SHIMS=FOLDER` adds the native door's shims in that folder to the wheel, those for
  its machine (`cargo xtask shims` builds them). Without it, a wheel for this machine gets the shim
  for the torch that is installed beside it, if there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

WORKSPACE = Path(__file__).resolve().parent.parent
TARGET = "GRUYERE_WHEEL_TARGET"
SHIMS = "GRUYERE_WHEEL_SHIMS"


def cargo() -> str:
    """The cargo command, even if it is not in pip's PATH."""
    found = shutil.which("cargo") or shutil.which("cargo", path=str(Path.home() / ".cargo" / "bin"))
    if not found:
        raise RuntimeError(
            "gruyere is built from Rust, and cargo was not found: install Rust 1.90 or newer "
            "(rustup), then try again"
        )
    return found


def workspace() -> dict[str, Any]:
    """The workspace's metadata from cargo."""
    if not (WORKSPACE / "Cargo.toml").exists():
        raise RuntimeError(
            f"{WORKSPACE} has no Cargo.toml: build from the repository (pip install "
            "./python_loader)"
        )
    command = [cargo(), "metadata", "--format-version=1", "--no-deps", "--locked"]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, cwd=WORKSPACE, check=True, stdout=subprocess.PIPE).stdout
    )
    return answer


class Version(MetadataHookInterface):
    """Takes the version from Cargo.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        packages = {package["name"]: package["version"] for package in workspace()["packages"]}
        metadata["version"] = packages["gruyere"]


class Rust(BuildHookInterface[Any]):
    """Builds the libraries and the command, and sets the wheel's tag."""

    def dependencies(self) -> list[str]:
        return ["cargo-zigbuild>=0.20", "ziglang"] if os.environ.get(TARGET) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = os.environ.get(TARGET)
        release = Path(workspace()["target_directory"])
        command = [cargo(), "zigbuild" if target else "build", "--release", "--locked"]
        command += ["-p", "gruyere", "-p", "gruyere-preload", "-p", "gruyere-cli"]
        command += ["-p", "gruyere-phantom-abi"]
        if target:
            command += ["--target", target]
            # A target may end in a glibc version, which cargo's folder name does not contain.
            release /= target.split(".")[0]
        subprocess.run(command, cwd=WORKSPACE, check=True)
        release /= "release"
        names = ("libgruyere.so", "libgruyere_driver.so", "libphantom_cuda.so", "gruyere")
        library, driver, stand_in, executable = stripped([release / name for name in names])
        build_data["force_include"][str(library)] = "gruyere/libgruyere.so"
        # Beside the library, for `gruyere run` with preload:driver.
        build_data["force_include"][str(driver)] = "gruyere/libgruyere_driver.so"
        # The stand-in GPU, for programs on machines without one (`_stand_in.py`).
        build_data["force_include"][str(stand_in)] = "gruyere/libphantom_cuda.so"
        # Beside the shim's source, which is compiled against it on the user's machine.
        build_data["force_include"][str(WORKSPACE / "include" / "gruyere.h")] = (
            "gruyere/_native/cpp/gruyere.h"
        )
        for shim in shims(release / "shims", library):
            build_data["force_include"][str(shim)] = f"gruyere/_native/prebuilt/{shim.name}"
        build_data["shared_scripts"][str(executable)] = "gruyere"
        # At the root, where the interpreter looks for .pth files when it starts.
        build_data["force_include"][str(Path(self.root, "gruyere_startup.pth"))] = (
            "gruyere_startup.pth"
        )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform(library, driver, stand_in, executable)}"


def shims(out: Path, library: Path) -> list[Path]:
    """The shims in GRUYERE_WHEEL_SHIMS for the library's machine, or the one for the torch that is
    installed here, built in `out`."""
    folder = os.environ.get(SHIMS)
    if folder:
        found = sorted(Path(folder).glob("torch-*.so"))
        return [shim for shim in found if machine(shim) == machine(library)]
    return [] if os.environ.get(TARGET) else installed(out)


def installed(out: Path) -> list[Path]:
    """The shim for the torch that is installed here, which a machine that runs the program without
    a compiler then has. Without it the package builds the shim when it first needs one."""
    sys.path.insert(0, str(WORKSPACE / "python_loader"))
    import build_shims

    out.mkdir(exist_ok=True)
    try:
        return [build_shims.build_for_installed(out)]
    except build_shims.shim.Unavailable as error:
        print(f"the wheel contains no shim of the native door: {error}")
        return []


def machine(file: Path) -> str:
    with file.open("rb") as opened:
        return str(ELFFile(opened)["e_machine"])


def objcopy() -> Optional[tuple[Path, dict[str, str]]]:
    """The objcopy of Rust's toolchain, which supports every machine, and the environment that it
    needs. None if the toolchain (a distribution's) does not include it."""
    rustc = Path(cargo()).with_name("rustc")
    ask = [rustc, "--print", "sysroot", "--print", "target-libdir"]
    answer = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout
    sysroot, libraries = map(Path, answer.splitlines())
    found = libraries.parent / "bin" / "rust-objcopy"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(sysroot / "lib")}
    return (found, environment) if found.exists() else None


def stripped(files: list[Path]) -> list[Path]:
    """Copies without debug information, which is three quarters of the size. Function names stay,
    for backtraces and profilers."""
    found = objcopy()
    if found is None:
        print("Rust's toolchain has no rust-objcopy: the wheel keeps its debug information")
        return files
    command, environment = found
    folder = files[0].parent / "stripped"
    folder.mkdir(exist_ok=True)
    for file in files:
        strip = [command, "--strip-debug", file, folder / file.name]
        subprocess.run(strip, check=True, env=environment)
    return [folder / file.name for file in files]


def platform(*files: Path) -> str:
    """The wheel's PEP 600 tag: the newest glibc version that the files need, and their machine."""
    newest, machine = (0, 0), ""
    for path in files:
        with path.open("rb") as file:
            elf = ELFFile(file)
            machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[elf["e_machine"]]
            newest = max(
                [newest, *(needed for section in elf.iter_sections() for needed in glibcs(section))]
            )
    if newest == (0, 0):
        raise RuntimeError(
            f"{files[0]} needs no versioned glibc symbol: is this a Linux without glibc?"
        )
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def glibcs(section: Any) -> list[tuple[int, int]]:
    """The glibc versions in a section of needed versions."""
    if not isinstance(section, GNUVerNeedSection):
        return []
    names = [auxiliary.name for _, versions in section.iter_versions() for auxiliary in versions]
    return [found for name in names if (found := glibc(name))]


def glibc(name: str) -> Optional[tuple[int, int]]:
    """`GLIBC_2.34` or `GLIBC_2.2.5` as numbers; None for any other name."""
    prefix, _, numbers = name.partition("_")
    parts = numbers.split(".")
    if prefix != "GLIBC" or not all(part.isdigit() for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])
