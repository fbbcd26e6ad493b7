"""The C++ compiler that builds a shim: how it is found and called, and what its errors mean."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .shim_folders import BUILDING, Unavailable, has_room, say

# Time limit for the compiler; a build takes some seconds.
PATIENCE_SECONDS = 300
# Compiler messages that mean that the folder is at fault, whatever the exit code.
_FOLDER = ("no space left", "quota exceeded", "read-only file system", "input/output error")
# Messages that mean that the machine ran out of memory and parts of the compiler were killed.
_PASSING = (
    "signal terminated",
    "due to signal",
    "unable to execute command",
    "error: killed",
    "out of memory",
    "allocate memory",
    "memory exhausted",
)
# Neither the compiler nor its files must outlive the process that started it: a shell in the same
# process group reads from a pipe that closes with that process, and then kills the group.
_WATCHED = """
exec 3<&0
folder=$1; shift
(read -r _ <&3; rm -rf "$folder"; kill -KILL 0) >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""
_CXX20 = "g++ 11 or newer, or clang++ 14 or newer"
_INSTALL = (
    "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), "
    "conda install -c conda-forge gxx (without root)"
)


class Refused(Unavailable):
    """The compiler rejects the source, and would reject it again."""


class Elsewhere(Exception):
    """The folder is at fault, so another folder may work; the message says why."""


@dataclass(frozen=True)
class Compiler:
    command: str
    # Identifies the compiler's file: a newer version may accept what this one rejects.
    digest: str


@dataclass(frozen=True)
class Request:
    torch: str
    standard: str
    abi: int
    cuda: int
    key: str
    source: Path
    ours: Path
    headers: Path
    cuda_headers: Path
    libraries: Path


@dataclass(frozen=True)
class Made:
    """The built files, which the caller moves to their final place."""

    file: Path
    # The file that lists the headers of torch that the compiler has read, and the list itself.
    list: Path
    headers: list[str]


def compiler() -> Compiler:
    """The machine's C++ compiler. Raises Unavailable if there is none."""
    chosen = os.environ.get("CXX")
    # conda's compiler has a name of its own.
    own = sorted(glob.glob(f"{glob.escape(sys.prefix)}/bin/{platform.machine()}-*-linux-gnu-c++"))
    for command in [chosen] if chosen else ["c++", "g++", "clang++", *map(shlex.quote, own)]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise Unavailable(
                f"CXX={command} is not a command ({error}): set CXX to a C++ compiler, or unset it"
            ) from error
        program = shutil.which(words[0]) if words else None
        if program:
            about = os.stat(program)
            known = f"{command}\n{os.path.realpath(program)}\n{about.st_size}\n{about.st_mtime_ns}"
            return Compiler(command, hashlib.sha256(known.encode()).hexdigest()[:24])
    looked = f"CXX={chosen} was not found" if chosen else "no c++, g++ or clang++ in PATH"
    raise Unavailable(
        f"there is no C++ compiler to build its shim ({looked}): {_INSTALL}, or set CXX; then run "
        "python -m gruyere --build-shim"
    )


def command(
    compiler: Compiler, request: Request, work: Path, more: tuple[str, ...] = ()
) -> list[str]:
    """The compiler's command line. The shim refers to torch's libraries by name, without their
    path: they are loaded already."""
    return [
        *shlex.split(compiler.command),
        *(f"-std={request.standard}", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={request.abi}",
        f"-DCUDA_VERSION={request.cuda}",
        # Leaves out torch's 2,000 headers of operators: the shim calls none of them.
        "-DAT_PER_OPERATOR_HEADERS",
        f'-DGRUYERE_SHIM_BUILD="{request.key}"',
        # Not -isystem: for system folders the compiler may list other, shorter paths.
        *(f"-I{folder}" for folder in (request.ours, request.headers, request.cuda_headers)),
        *("-MD", "-MF", str(work / "shim.d")),
        str(request.source),
        *("-o", str(work / "shim.so"), f"-L{request.libraries}", "-lc10_cuda", "-lc10"),
        # Never unload the shim: memory may be freed until the very end of the process.
        "-Wl,-z,nodelete",
        *more,
    ]


@contextlib.contextmanager
def built(compiler: Compiler, request: Request, folder: Path) -> Iterator[Made]:
    """Build the shim in a temporary folder inside `folder`. At exit the temporary folder is removed
    with everything that was not moved out of it. Raises Elsewhere, Refused and Unavailable."""
    if not has_room(folder):
        raise Elsewhere("the disk is full")
    say(f"building the native door's shim for torch {request.torch} in {folder}, once: about 15 s")
    work = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder))
    log = folder / f"shim-{request.key}.log"
    words = command(compiler, request, work)
    process: Optional[subprocess.Popen[bytes]] = None
    try:
        with (work / "output").open("wb") as output:
            output.write(f"{shlex.join(words)}\n".encode())
            output.flush()
            process = _start(words, work, output)
            try:
                code = process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                raise Unavailable(
                    f"the C++ compiler did not finish within {PATIENCE_SECONDS} s"
                ) from None
        if code != 0:
            said = (work / "output").read_text(encoding="utf-8", errors="replace")
            with contextlib.suppress(OSError):
                (work / "output").rename(log)
            raise _failure(compiler, request, code, said.partition("\n")[2], log)
        headers = read(work / "shim.d", request.headers)
        (work / "headers").write_text("".join(f"{name}\n" for name in headers), encoding="utf-8")
        with contextlib.suppress(OSError):
            log.unlink()
        yield Made(work / "shim.so", work / "headers", headers)
    finally:
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                process.stdin.close()
        shutil.rmtree(work, ignore_errors=True)


def _start(words: list[str], work: Path, output: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "LC_ALL": "C", "LD_PRELOAD": "", "TMPDIR": str(work)}
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHED, "sh", str(work), *words],
        stdin=subprocess.PIPE,
        stdout=output,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def read(listed: Path, root: Path) -> list[str]:
    """The files below `root` that the compiler has read, sorted. `listed` is its output of -MD (a
    rule for make)."""
    text = listed.read_text(encoding="utf-8", errors="surrogateescape").replace("\\\n", " ")
    words = re.findall(r"(?:\\.|[^\s\\])+", text.partition(": ")[2])
    files = {re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in words}
    below = f"{root}{os.sep}"
    found = sorted(file[len(below) :] for file in files if file.startswith(below))
    if not found:
        raise Unavailable("the C++ compiler did not list the headers that it read (-MD)")
    return found


def _failure(compiler: Compiler, request: Request, code: int, output: str, log: Path) -> Exception:
    told = output.lower()
    if any(words in told for words in _FOLDER):
        return Elsewhere(_line(output))
    # A shell wrapper reports a signal as 128 and more.
    is_final = 0 < code < 128 and not any(words in told for words in _PASSING)
    kind = Refused if is_final else Unavailable
    return kind(
        f"{compiler.command} cannot build the shim for torch {request.torch}: "
        f"{explained(output, request)} (full output: {log})"
    )


def explained(output: str, request: Request) -> str:
    """What is missing, and how to get it."""
    told = output.lower()
    missing = r"fatal error: '?([^':]+?)'?(?:: no such file| file not found)"
    found = re.search(missing, output, re.IGNORECASE)
    header = found[1] if found else ""
    if "-std=" in told and ("unrecognized" in told or "invalid value" in told):
        return f"it is too old for {request.standard}: {_CXX20}"
    if header and (request.headers / header.partition("/")[0]).exists():
        return f"torch's header {header} is missing: reinstall torch"
    if header.endswith(".h"):
        return f"the C library's header {header} is missing: apt install libc6-dev, or {_INSTALL}"
    if header:
        return f"the C++ library's header {header} is missing or too old: {_INSTALL}"
    if "is not the one that is known" in told or "abstract" in told:
        return (
            "the interface of this torch differs from that of the "
            f"{request.torch.partition('+')[0]} that this gruyere supports: a newer gruyere may "
            f"support it ({_line(output)})"
        )
    if "cc1plus" in told:
        return f"the compiler's installation is incomplete: {_INSTALL}"
    if re.search(r"cannot find -l|cannot find 'ld'|unable to .*linker|collect2: fatal", told):
        return f"it cannot link ({_line(output)}): apt install binutils libstdc++6, or {_INSTALL}"
    if request.standard == "c++20" and "std" in told:
        return f"{_line(output)}; torch's headers need C++20: {_CXX20}"
    return _line(output)


def _line(output: str) -> str:
    """The line of a compiler's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()),
        lines[-1] if lines else "the compiler printed nothing",
    )
