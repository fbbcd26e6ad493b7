"""Builds the native door's shims for a wheel: one for each build of torch in shims.txt.

    python build_shims.py --out FOLDER [--wheels FOLDER] [--machine MACHINE ...]
                          [--installed FOLDER ...] [VERSION ...]

pip downloads torch's wheels, verified by hash, into the folder of --wheels (default: a temporary
one); the headers and two small libraries of each wheel stay there. The same compiler produces the
same bytes. Shims for another machine are built with Debian's cross compiler (g++-aarch64-linux-gnu)
and GCC's C++ library. `cargo xtask shims` calls this script.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import types
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MACHINES = ("x86_64", "aarch64")
LIST = HERE / "shims.txt"
# The newest versions that a shim may need of glibc and of GCC 8's C++ library and runtime, as in
# torch's own wheels.
MOST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}

sys.path.insert(0, str(HERE))

from gruyere._native import shim, shim_compiler  # noqa: E402


def listed(machine: str) -> dict[str, str]:
    """The hashes in shims.txt of torch's wheels for the machine, by version."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {line[1]: line[2] for line in lines if line[:1] == [machine]}


def unpacked(version: str, wheels: Path, machine: str) -> Path:
    """A folder with the part of torch's wheel that a shim is built from."""
    folder = wheels / machine / version
    line = f"torch=={version} --hash={listed(machine)[version]}\n"
    if (folder / "complete").exists() and (folder / "complete").read_text() == line:
        return folder
    with tempfile.TemporaryDirectory(dir=wheels) as there:
        wanted = Path(there, "requirements.txt")
        wanted.write_text(line)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        pip += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes"]
        # All wheels of a version have the same C++ part; this is the one whose hash is listed.
        pip += ["--python-version", "3.11", "--platform", f"manylinux_2_28_{machine}"]
        subprocess.run([*pip, "--dest", there, "-r", wanted], check=True)
        (wheel,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            parts = ("torch/include/", "torch/lib/libc10", "torch/version.py")
            archive.extractall(folder, [n for n in archive.namelist() if n.startswith(parts)])
    (folder / "complete").write_text(line)
    return folder


def torch_in(folder: Path) -> types.SimpleNamespace:
    """An object with the attributes of torch that the package uses, without importing torch."""
    told: dict[str, object] = {}
    exec((folder / "torch" / "version.py").read_text(), told)
    # All listed builds have the new ABI; a library of the old ABI has no such names.
    if b"__cxx11" not in (folder / "torch" / "lib" / "libc10.so").read_bytes():
        raise shim.Unavailable(f"{folder} has a torch built with the old ABI of the C++ library")
    return types.SimpleNamespace(
        __version__=told["__version__"],
        __file__=str(folder / "torch" / "__init__.py"),
        version=types.SimpleNamespace(git_version=told["git_version"], cuda=told["cuda"]),
        _C=types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
    )


def compiler(machine: str) -> shim_compiler.Compiler:
    if machine == platform.machine():
        return shim_compiler.compiler()
    name = f"{machine}-linux-gnu-g++"
    if not shutil.which(name):
        raise shim.Unavailable(f"{name} is missing: apt install g++-{machine}-linux-gnu")
    return shim_compiler.Compiler(name, "")


def build(folder: Path, out: Path, machine: str = platform.machine()) -> Path:
    """The shim for the torch in `folder`."""
    torch = torch_in(folder)
    key = shim.key(torch, machine)
    request = shim.request(torch, key)
    more = ["-DGRUYERE_PORTABLE", "-g0", "-Wl,--build-id=none", "-Wl,--strip-all"]
    # The shim must not contain paths of this machine.
    more += [f"-ffile-prefix-map={path}=/" for path in (folder, HERE, HERE.parent)]
    with tempfile.TemporaryDirectory() as work:
        words = shim_compiler.command(compiler(machine), request, Path(work), tuple(more))
        subprocess.run(words, check=True, timeout=shim_compiler.PATIENCE_SECONDS)
        content = Path(work, "shim.so").read_bytes()
    file = out / f"torch-{torch.__version__.partition('+')[0]}-{key}.so"
    file.write_bytes(content)
    return file


def build_for_installed(out: Path) -> Path:
    """The shim for the torch among the packages of the Python that runs this, which pip hides from
    the build of a wheel, but does not move. Raises Unavailable if there is none to build."""
    folders = (*map(sysconfig.get_path, ("purelib", "platlib")), site.getusersitepackages())
    found = next((f for f in map(Path, folders) if (f / "torch" / "version.py").is_file()), None)
    if found is None:
        raise shim.Unavailable(f"there is no torch in {', '.join(folders)}")
    try:
        return build(found, out)
    except shim.Unavailable:
        raise
    except Exception as error:
        # Whatever that torch is: the shim is an extra, and the rest of the wheel is not.
        raise shim.Unavailable(f"the shim for the torch in {found}: {error!r}") from error


def wants(file: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each library that the shim needs."""
    # readelf reads the files of every machine.
    told = subprocess.run(
        ["readelf", "--version-info", file], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", told):
        found = tuple(map(int, version.split(".")))
        newest[name] = max(found, newest.get(name, ()))
    return newest


def check(file: Path) -> None:
    for name, found in wants(file).items():
        if found > MOST[name]:
            raise SystemExit(f"{file} needs {name}_{'.'.join(map(str, found))}, which is too new")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--machine", action="append", choices=MACHINES, dest="machines")
    parser.add_argument(
        "--installed",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="also build for the torch installed there, without a download; without a VERSION, "
        "build only for it",
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("torch-*.so"):
        old.unlink()
    for folder in options.installed:
        told(build(folder, options.out))
    machines = options.machines or [platform.machine()]
    if options.installed and not options.versions:
        machines = []
    with tempfile.TemporaryDirectory() as there:
        wheels = options.wheels or Path(there)
        for machine in machines:
            known = listed(machine)
            unknown = sorted(set(options.versions) - set(known))
            if unknown:
                parser.error(f"{', '.join(unknown)}: not among {', '.join(known)} ({LIST})")
            (wheels / machine).mkdir(parents=True, exist_ok=True)
            for version in options.versions or known:
                told(build(unpacked(version, wheels.resolve(), machine), options.out, machine))


def told(file: Path) -> None:
    check(file)
    print(f"{file.stat().st_size:>10}  {file}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except shim.Unavailable as error:
        raise SystemExit(str(error)) from None
