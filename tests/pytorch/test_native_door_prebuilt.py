"""The native door's shims that a wheel brings: what is built beforehand, and when it is taken."""

import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from conftest import GRUYERE, HERE, ROOT
from door import PRELUDE

CODE = PRELUDE.replace("gpu.install()", "gruyere.enable()") + """
from gruyere import _enable
from gruyere._native import shim
print(_enable.door()[0], shim.file(), _enable.door()[1])
assert tensor(4).numel() == 4 * MIB
"""


@pytest.fixture(scope="module")
def builder():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "python_loader"))
        yield importlib.import_module("build_shims")


@pytest.fixture(scope="module")
def built(builder, tmp_path_factory):
    """That for the torch of the tests."""
    (root,) = importlib.util.find_spec("torch").submodule_search_locations
    return builder.build(Path(root).parent, tmp_path_factory.mktemp("shims"))


@pytest.fixture
def package(tmp_path):
    """The package as a wheel leaves it, for a machine without a compiler, a home or a place for
    temporary files."""
    there = tmp_path / "site"
    shutil.copytree(ROOT / "python_loader" / "gruyere", there / "gruyere")
    shutil.copy(ROOT / "include" / "gruyere.h", there / "gruyere" / "_native" / "cpp")
    (there / "gruyere" / "_native" / "prebuilt").mkdir()
    return there / "gruyere"


def run(phantom, package):
    return phantom.run(
        "",
        code=CODE,
        allocator="door",
        PYTHONPATH=f"{HERE / 'programs'}:{package.parent}",
        GRUYERE_LIBRARY=GRUYERE,
        XDG_CACHE_HOME="/proc/nowhere",
        TMPDIR="/proc",
        PATH="/nowhere",
        CXX="/nowhere/c++",
    )


def test_it_serves_without_a_compiler_or_a_folder_of_ones_own(phantom, package, built):
    shutil.copy(built, package / "_native" / "prebuilt")
    ran = run(phantom, package)
    file = package / "_native" / "prebuilt" / built.name
    assert ran.code == 0 and ran.out.startswith(f"native {file} "), ran.out + ran.err
    assert ran.err == ""


def test_one_of_another_build_is_not_loaded_under_whatever_name(phantom, package, built):
    key = built.stem.rpartition("-")[2]
    other = built.read_bytes().replace(key.encode(), b"0" * len(key))
    (package / "_native" / "prebuilt" / built.name).write_bytes(other)
    (package / "_native" / "prebuilt" / f"torch-2.11.0-{'0' * len(key)}.so").write_bytes(other)
    ran = run(phantom, package)
    said = "pluggable None the native door is not available"
    assert ran.code == 0 and ran.out.startswith(said), ran.out


@pytest.mark.thorough
def test_it_wants_no_newer_libraries_than_torchs_wheels_and_is_the_same_each_time(
    builder, built, tmp_path
):
    found = builder.wants(built)
    assert found.keys() == builder.MOST.keys()
    assert all(version <= builder.MOST[name] for name, version in found.items()), found
    (root,) = importlib.util.find_spec("torch").submodule_search_locations
    again = builder.build(Path(root).parent, tmp_path)
    assert again.name == built.name and again.read_bytes() == built.read_bytes()
    assert str(root).encode() not in built.read_bytes()


def test_a_wheel_of_a_clone_gets_the_one_for_the_torch_beside_it(
    builder, built, tmp_path, monkeypatch
):
    assert builder.build_for_installed(tmp_path).name == built.name
    # Without a compiler, or without a torch, there is none, which the build of a wheel passes over.
    with monkeypatch.context() as here:
        here.setenv("CXX", "/nowhere/c++")
        with pytest.raises(builder.shim.Unavailable, match="there is no C\\+\\+ compiler"):
            builder.build_for_installed(tmp_path)
    monkeypatch.setattr(builder.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(builder.site, "getusersitepackages", lambda: str(tmp_path))
    with pytest.raises(builder.shim.Unavailable, match="there is no torch in .*purelib"):
        builder.build_for_installed(tmp_path)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_there_is_one_for_each_version_that_is_served(builder, machine):
    listed = builder.listed(machine)
    minors = {tuple(map(int, version.split(".")[:2])) for version in listed}
    shim = importlib.import_module("gruyere._native.shim")
    assert min(minors) == shim.OLDEST and max(minors) == shim.NEWEST
    assert len(minors) == shim.NEWEST[1] - shim.OLDEST[1] + 1
    assert all(hashed.startswith("sha256:") for hashed in listed.values())
