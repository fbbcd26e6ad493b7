"""The Python package in a process into which LD_PRELOAD has put libgruyere.so."""

import subprocess
import sys

from conftest import GRUYERE, ROOT, clean_environment

COPIES = """
from gruyere._native import library
print(library.path())
assert library.load().gruyere_version()
with open("/proc/self/maps") as maps:
    print(len({line.split()[5] for line in maps if line.rstrip().endswith("libgruyere.so")}))
"""


def run(tmp_path, code, preload=True, **settings):
    environment = (
        clean_environment() | {"PYTHONPATH": f"{ROOT / 'python_loader'}:{tmp_path}"} | settings
    )
    if preload:
        environment["LD_PRELOAD"] = str(GRUYERE)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def installed(tmp_path, version):
    """As pip leaves it: the package's version, where Python looks for it."""
    folder = tmp_path / f"gruyere-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gruyere\nVersion: {version}\n")


def version(tmp_path):
    ran = run(
        tmp_path,
        "from gruyere._native import library; print(library.load().gruyere_version().decode())",
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_copy_that_is_preloaded_is_used_and_no_other(tmp_path):
    other = tmp_path / "libgruyere.so"
    other.write_bytes(GRUYERE.read_bytes())
    ran = run(tmp_path, COPIES, GRUYERE_LIBRARY=str(other))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(GRUYERE), "1"]


def test_without_preload_the_chosen_copy_is_used(tmp_path):
    other = tmp_path / "libgruyere.so"
    other.write_bytes(GRUYERE.read_bytes())
    ran = run(tmp_path, COPIES, preload=False, GRUYERE_LIBRARY=str(other))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(other), "1"]


def test_a_preloaded_copy_of_another_version_is_refused(tmp_path):
    found = version(tmp_path)
    installed(tmp_path, "0.0.9")
    ran = run(tmp_path, "from gruyere._native import library; library.load()")
    assert ran.returncode != 0
    for part in ("GruyereError", str(GRUYERE), found, "0.0.9", "unset LD_PRELOAD"):
        assert part in ran.stderr


def test_a_preloaded_copy_of_the_same_version_is_used(tmp_path):
    installed(tmp_path, version(tmp_path))
    ran = run(tmp_path, COPIES)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(GRUYERE), "1"]
