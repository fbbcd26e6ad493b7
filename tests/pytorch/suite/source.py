"""Where PyTorch's own tests come from: Debian's source package of pytorch, which has its `test/`.

Only what is needed is unpacked, into target/torch-suite, and the archive is not kept. apt-get
brings it where there is one with Debian's keys (from a list of sources of our own: the machine's
are not touched); elsewhere it is the same file by HTTP. Both must have the checksum below.
"""

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "2.6.0+dfsg-7"
ARCHIVE = "pytorch_2.6.0+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
MIRROR = "http://deb.debian.org/debian"
SUITE = "trixie"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Unreachable(Exception):
    """No registry has given the archive."""


def tests(folder, names):
    """The files of `names` below `folder`, fetched where they are not there yet."""
    stamp = folder / "complete"
    wanted = f"{SHA256}\n{names}\n"
    if not (stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack(fetch(Path(scratch)), names, folder)
        stamp.write_text(wanted)
    return [folder / name for name in names]


def fetch(scratch):
    reasons = []
    for way in (by_apt, by_http):
        try:
            archive = way(scratch)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{way.__name__}: {error}")
            continue
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found == SHA256:
            return archive
        reasons.append(f"{way.__name__}: {ARCHIVE} has the checksum {found}, not {SHA256}")
    raise Unreachable("; ".join(reasons))


def by_apt(scratch):
    if not KEYS.exists():
        raise FileNotFoundError(f"no {KEYS}")
    for name in ("lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "sources.list").write_text(f"deb-src [signed-by={KEYS}] {MIRROR} {SUITE} main\n")
    apt = [
        "apt-get",
        "-qq",
        "-o",
        f"Dir::Etc::SourceList={scratch}/sources.list",
        "-o",
        "Dir::Etc::SourceParts=/dev/null",
        "-o",
        f"Dir::State::Lists={scratch}/lists",
        "-o",
        f"Dir::Cache={scratch}/cache",
        # Else an update that reached nothing is a success.
        "-o",
        "APT::Update::Error-Mode=any",
        # The folder is ours alone; apt's own user need not be able to write there.
        "-o",
        "APT::Sandbox::User=",
    ]
    source = ["source", "--download-only", "--tar-only", f"pytorch={VERSION}"]
    for command in (["update"], source):
        done = subprocess.run([*apt, *command], cwd=scratch, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["nothing said"]
            raise OSError(f"apt-get {command[0]}: {lines[-1]}")
    return scratch / ARCHIVE


def by_http(scratch):
    address = f"{MIRROR}/pool/main/p/pytorch/{ARCHIVE.replace('+', '%2b')}"
    archive = scratch / ARCHIVE
    with urllib.request.urlopen(address, timeout=60) as answer, archive.open("wb") as file:
        shutil.copyfileobj(answer, file)
    return archive


def unpack(archive, names, folder):
    """By the last parts of their paths: the archive's own folder has the version in its name."""
    with tarfile.open(archive) as files:
        for member in files:
            name = os.path.relpath(member.name, member.name.split("/")[0])
            if name in names:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.extractfile(member).read())
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise Unreachable(f"{ARCHIVE} has no {', '.join(missing)}")
