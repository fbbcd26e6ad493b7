"""The Python package: what the wheel has, the ways in, and what is said where there is no way."""

import json
import socket
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version as metadata_version
from pathlib import Path

import pytest

import environment
from conftest import ROOT, clean_environment
from package import LIBRARIES

# What a program finds of itself: everything that python sets before it runs it.
SELF = """
import json, sys
names = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
spec = __spec__ and [__spec__.name, __spec__.origin, __spec__.parent]
print(
    json.dumps(
        dict(
            argv=sys.argv,
            path=sys.path,
            spec=spec,
            loader=type(__loader__).__name__,
            main=sys.modules["__main__"].__dict__ is globals(),
            names={name: globals().get(name) for name in names},
            all=sorted(set(globals()) - {"names", "spec"}),
            code=sys._getframe().f_code.co_filename,
        )
    )
)
"""

# A program that uses CUDA and knows nothing of Gruyère, followed by what the package says.
USES_CUDA = """
import torch
kept = [torch.full((n,), 7.0, device="cuda") for n in (10, 1 << 20)]
"""
SAYS = """
import json, os, gruyere
print(
    json.dumps(
        dict(
            enabled=gruyere.is_enabled(),
            reason=gruyere.disable_reason(),
            conf=os.environ.get("GRUYERE_CONF"),
        )
    )
)
"""

LIBRARY_NUMBERS = """
import ctypes
from gruyere._native import library
class Stats(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("version", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in "total_memory limit reserved reserved_peak live live_peak pending".split()
    ]


def numbers(device=0):
    stats = Stats(size=ctypes.sizeof(Stats))
    assert library.load().gruyere_stats(device, ctypes.byref(stats)) == 0
    return stats
"""


@pytest.mark.thorough
def test_one_wheel_for_every_python_holds_library_command_and_types(wheel_installed):
    wheel = wheel_installed[1]
    name, version, python, abi, platform = wheel.name.removesuffix(".whl").split("-")
    assert (name, python, abi) == ("gruyere", "py3", "none")
    assert platform.startswith("manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"gruyere-{version}.dist-info/METADATA").decode())
    assert {
        "gruyere/libgruyere.so",
        "gruyere/libgruyere_driver.so",
        "gruyere/py.typed",
        "gruyere_startup.pth",
    } <= names
    # What the native door's shim is built from on the user's machine.
    assert {
        f"gruyere/_native/cpp/{name}"
        for name in ("calls.h", "checkpoint.h", "context.h", "told.h", "shim.cpp", "gruyere.h")
    } <= names
    # Ready-made for the torch of this environment, where the native door serves it.
    built = [name for name in names if name.startswith("gruyere/_native/prebuilt/torch-")]
    assert len(built) == (environment.door_of(metadata_version("torch")) == "native"), built
    assert f"gruyere-{version}.data/scripts/gruyere" in names
    assert {name.split("/")[0] for name in names} == {
        "gruyere", "gruyere_startup.pth", f"gruyere-{version}.data", f"gruyere-{version}.dist-info",
    }  # fmt: skip
    assert metadata.get_all("Requires-Dist") is None
    assert metadata["Requires-Python"] == ">=3.9"


def test_the_command_is_installed(installed):
    without = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}
    installed.command("gruyere", "ps", "--directory", installed.folder, **without).check()
    assert "bench" in installed.command("gruyere", "--help", **without).check().out


def test_importing_it_imports_neither_torch_nor_the_library(installed):
    code = """
import sys, gruyere
assert "torch" not in sys.modules and "libgruyere" not in open("/proc/self/maps").read()
assert {"enable", "disable_reason", "is_enabled"} <= set(dir(gruyere))
try:
    gruyere.nothing
except AttributeError as error:
    print(error)
"""
    assert "nothing" in installed.code(code).check().out


def test_an_interpreter_that_is_not_asked_to_does_not_even_import_it(installed):
    for value in (None, "", "0"):
        ran = installed.code(
            "import sys; print([name for name in sys.modules if 'gruyere' in name])",
            GRUYERE_ENABLE=value,
        )
        assert ran.check().out.strip() == "[]"


def test_enable_serves_what_the_program_allocates(installed):
    code = (
        "import gruyere\ngruyere.enable(limit='90%', share=False)\n"
        f"{USES_CUDA}{LIBRARY_NUMBERS}\nprint(numbers().live)\n{SAYS}"
    )
    ran = installed.code(code)
    assert ran.report == {"enabled": True, "reason": None, "conf": "limit:90%,share:off"}
    assert int(ran.out.splitlines()[0]) == 512 + (4 << 20)
    assert ran.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("program.py",),
        ("-m", "gruyere", "program.py"),
        ("-m", "gruyere", "--limit", "90%", "program.py"),
    ],
)
def test_the_launch_line_enables_it(installed, arguments):
    installed.write("program.py", USES_CUDA + SAYS)
    ran = installed.python(*arguments, GRUYERE_ENABLE=None if "-m" in arguments else "1")
    assert ran.report["enabled"]
    assert ran.report["conf"] == ("limit:90%" if "--limit" in arguments else "")
    assert ran.err == ""


def test_all_hooks_reach_the_library(installed):
    code = f"""
import torch, gruyere
gruyere.enable()
{LIBRARY_NUMBERS}
block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    torch.cuda._sleep(1000)
block.record_stream(side)
del block
waiting = numbers().pending
torch.cuda.synchronize()
torch.cuda.empty_cache()
emptied = numbers().reserved
torch.cuda.set_per_process_memory_fraction(0.25)
capped = numbers().limit / numbers().total_memory
try:
    torch.empty(int(0.3 * numbers().total_memory), dtype=torch.uint8, device="cuda")
    refused = ""
except torch.OutOfMemoryError as error:
    refused = str(error)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = torch.zeros(1 << 20, device="cuda")
graph.replay()
import json
print(json.dumps(dict(waiting=waiting, emptied=emptied, capped=capped, refused=refused)))
"""
    ran = installed.code(code, PHANTOM_MEMORY="1GiB")
    assert ran.report["waiting"] == 64 << 20, "record_stream was not heard"
    assert ran.report["emptied"] == 0, "empty_cache was not heard"
    assert ran.report["capped"] == pytest.approx(0.25, abs=0.01)
    assert ran.report["refused"].startswith("CUDA out of memory. ")
    assert ran.err == "", "the library warns where a hook is not wired"


def test_enabling_leaves_cuda_alone_so_that_children_may_be_forked(installed):
    code = """
import os, gruyere
gruyere.enable()
import torch
child = os.fork()
if child == 0:
    assert torch.ones(3, device="cuda").data_ptr() and gruyere.is_enabled()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
torch.ones(3, device="cuda")
child = os.fork()
if child == 0:
    os._exit(8 if "forked" in gruyere.disable_reason() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
"""
    assert installed.code(code).check().err == ""


@pytest.mark.parametrize(
    "what", ["script", "below", "link", "folder", "archive", "module", "package"]
)
def test_a_program_finds_itself_as_under_python(installed, what):
    installed.write("sub/program.py", SELF)
    (installed.folder / "link.py").symlink_to(installed.folder / "sub" / "program.py")
    installed.write("folder/__main__.py", SELF)
    with zipfile.ZipFile(installed.folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SELF)
    installed.write("package/__init__.py", "")
    installed.write("package/__main__.py", SELF)
    line = {
        "script": ["sub/program.py"], "below": ["./sub/program.py"], "link": ["link.py"],
        "folder": ["folder"], "archive": ["archive.zip"],
        "module": ["-m", "sub.program"], "package": ["-m", "package"],
    }[what] + ["--limit", "a b", "-m"]  # fmt: skip
    assert installed.python("-m", "gruyere", *line).report == installed.python(*line).report


@pytest.mark.parametrize("line", [("missing.py",), ("-m", "missing_module")])
def test_a_program_that_is_not_there_is_named(installed, line):
    ours, pythons = installed.python("-m", "gruyere", *line), installed.python(*line)
    assert ours.code == pythons.code != 0
    assert "missing" in ours.err.splitlines()[-1]


def test_exits_and_exceptions_are_the_programs_own(installed):
    installed.write(
        "exits.py",
        "import atexit, sys\natexit.register(lambda: print(data))\ndata = 'late'\nsys.exit(5)",
    )
    ran = installed.python("-m", "gruyere", "exits.py")
    assert (ran.code, ran.out.strip()) == (5, "late")


@pytest.mark.parametrize(
    "program",
    [
        "def inner():\n    raise KeyError('lost')\ninner()",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
        "def broken(:",
        "import sys\nsys.excepthook = lambda *about: print(*about[:2])\nint('x')",
        "raise KeyboardInterrupt",
    ],
)
def test_an_uncaught_error_looks_as_without_us(installed, program):
    installed.write("raises.py", program)
    ours, pythons = installed.python("-m", "gruyere", "raises.py"), installed.python("raises.py")
    assert (ours.code, ours.out) == (pythons.code, pythons.out)
    if "KeyboardInterrupt" not in program:
        assert ours.err == pythons.err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ([], "usage"),
        (["-m"], "no module"),
        (["--limit"], "a value is missing"),
        (["-x", "program.py"], "no such option"),
        (["--bogus", "1", "program.py"], "backing"),
        (["--share=maybe", "program.py"], "on|off"),
    ],
)
def test_a_launch_line_that_is_wrong_stops_with_words_that_help(installed, line, named):
    installed.write("program.py", "print('ran')")
    ran = installed.python("-m", "gruyere", *line)
    assert ran.code == 2 and ran.out == ""
    assert named in ran.err and "Traceback" not in ran.err


def test_a_message_of_several_lines_is_one_write_so_that_those_of_ranks_do_not_mix():
    # Each write to such a socket is a packet.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = [sys.executable, "-u", "-m", "gruyere", "--limit"]
    path = str(ROOT / "python_loader")
    with ours, theirs:
        ended = subprocess.run(line, stderr=theirs, env={**clean_environment(), "PYTHONPATH": path})
        theirs.close()
        packets = list(iter(lambda: ours.recv(1 << 16).decode(), ""))
    assert ended.returncode == 2, packets
    (packet,) = packets
    assert packet.startswith("gruyere: --limit: a value is missing\nusage: "), packet
    assert packet.endswith("\n"), packet


@pytest.mark.parametrize("variable", ["beside", "2"])
def test_a_variable_that_says_neither_yes_nor_no_stops_the_program_with_what_to_say(
    installed, variable
):
    ran = installed.code("import torch", GRUYERE_ENABLE=variable)
    assert ran.code == 1 and f"GRUYERE_ENABLE={variable}: expected 1 or 0" in ran.err


def test_help_and_version(installed):
    help_ = installed.python("-m", "gruyere", "--help").check().out
    assert "--build-shim" in help_
    assert installed.python("-m", "gruyere", "--version").check().out.startswith("gruyere 0.")


def test_the_help_is_printed_where_the_output_has_only_ascii(installed):
    ascii_only = {"PYTHONIOENCODING": "ascii:strict"}
    help_ = installed.python("-m", "gruyere", "--help", **ascii_only).check().out
    assert "with Gruyere in place of" in help_ and "--build-shim" in help_


CHILDREN = """
import json, os, sys
import torch
import torch.multiprocessing as mp

def work(index, folder):
    import gruyere
    found = bool(torch.ones(4, device="cuda").data_ptr()) if gruyere.is_enabled() else False
    with open(f"{folder}/{index}.json", "w") as file:
        json.dump([gruyere.is_enabled(), os.environ.get("GRUYERE_CONF"), found], file)

if __name__ == "__main__":
    how, folder = sys.argv[1:]
    os.makedirs(folder)
    mp.start_processes(work, args=(folder,), nprocs=2, start_method=how)
    import gruyere
    print(gruyere.is_enabled())
"""


@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("way", ["variable", "launcher", "call"])
def test_worker_processes_are_enabled_too(installed, how, way):
    call = "import gruyere\ngruyere.enable(limit='90%')\n" if way == "call" else ""
    # Under spawn the script's top runs again in each worker: the call there asks for what the
    # worker has.
    installed.write("program.py", call + CHILDREN)
    line = ["-m", "gruyere", "--limit", "90%"] if way == "launcher" else []
    settings = {"GRUYERE_ENABLE": 1, "GRUYERE_CONF": "limit:90%"} if way == "variable" else {}
    ran = installed.python(*line, "program.py", how, "answers", **settings).check()
    assert ran.out.strip() == "True" and "Gruyere" not in ran.err
    for index in range(2):
        assert json.loads((installed.folder / "answers" / f"{index}.json").read_text()) == [
            True,
            "limit:90%",
            True,
        ]


def test_data_loader_workers_and_their_tensors(installed):
    code = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    kept = torch.ones(1 << 20, device="cuda")
    for context in ("fork", "spawn"):
        data = DataLoader(
            TensorDataset(torch.arange(64.0)),
            batch_size=8,
            num_workers=2,
            multiprocessing_context=context,
            pin_memory=True,
        )
        assert sum(float(batch.sum()) for (batch,) in data) == 2016, context
        assert all(batch.cuda(non_blocking=True).is_cuda for (batch,) in data)
    import gruyere
    print(gruyere.is_enabled())
"""
    assert installed.code(code, GRUYERE_ENABLE=1).check().out.strip() == "True"


@pytest.mark.parametrize("way", ["inside", "around", "script inside", "script variable"])
def test_torchrun_and_its_ranks(installed, way):
    installed.write(
        "train.py",
        USES_CUDA
        + (
            "import json, os, gruyere\njson.dump([gruyere.is_enabled(), "
            "os.environ['WORLD_SIZE']], open(os.environ['RANK'], 'w'))"
        ),
    )
    ranks = ["--standalone", "--nproc-per-node=2"]
    module = ["-m", "torch.distributed.run", *ranks]
    # The console script as pip has installed it, beside the torch that this environment sees.
    script = [Path(sys.executable).parent / "torchrun", *ranks]
    line = {
        "inside": [*module, "-m", "gruyere", "train.py"],
        "around": ["-m", "gruyere", *module, "train.py"],
        "script inside": [*script, "-m", "gruyere", "train.py"],
        "script variable": [*script, "train.py"],
    }[way]
    installed.python(*line, GRUYERE_ENABLE=1 if way.endswith("variable") else None).check()
    for rank in "01":
        assert json.loads((installed.folder / rank).read_text()) == [True, "2"]


def test_asking_where_torch_is_does_not_spoil_the_launch_line(installed):
    code = (
        "import importlib.util\nassert importlib.util.find_spec('torch').loader.path\n"
        f"{USES_CUDA}{SAYS}"
    )
    ran = installed.code(
        code + "\nassert 'exec_module' not in vars(torch.__spec__.loader)", GRUYERE_ENABLE=1
    )
    assert ran.report["enabled"]


def test_a_program_without_torch_is_not_touched(installed):
    code = (
        "import sys\nprint('torch' in sys.modules, 'libgruyere' in "
        "open('/proc/self/maps').read())\n"
        + SAYS
    )
    ran = installed.code(code, GRUYERE_ENABLE=1).check()
    assert ran.out.splitlines()[0] == "False False"
    assert "torch has not been imported yet" in ran.report["reason"]


# What stands in the way: the program, the environment, and words that must be in the error.
OBSTACLES = {
    "too late": ("torch.ones(1, device='cuda')", {}, ["too late", "python -m gruyere"]),
    "twice": ("gruyere.enable()", {"CALL": "share=False"}, ["called before", "share:off"]),
    "hidden devices": ("", {"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES", "hides"]),
    "no library": (
        "",
        {"GRUYERE_LIBRARY": "/nowhere/libgruyere.so"},
        ["/nowhere/libgruyere.so", "unset GRUYERE_LIBRARY"],
    ),
    "not a library": (
        "",
        {"GRUYERE_LIBRARY": "/etc/passwd"},
        ["/etc/passwd", "reinstall gruyere"],
    ),
    "unknown key": ("", {"CALL": "bogus=1"}, ["bogus", "backing", "limit"]),
    "bad value": ("", {"CALL": "limit='lots'"}, ["limit:lots", "512KiB"]),
    "comma": ("", {"CALL": "limit='1GiB,share:off'"}, ["limit=", "comma"]),
    "bad environment": ("", {"GRUYERE_CONF": "share:perhaps"}, ["share:perhaps", "on|off"]),
    "another allocator": (
        "torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(str(library), "
        "'gruyere_malloc', 'gruyere_free'))"
        "; torch.cuda.memory_allocated = None; torch.empty(1, device='cuda'); "
        "torch.cuda._initialized = False",
        {},
        ["another allocator"],
    ),
}


@pytest.mark.parametrize("what", OBSTACLES)
def test_what_stands_in_the_way_is_said_with_a_remedy(installed, what):
    before, settings, words = OBSTACLES[what]
    settings = dict(settings)
    call = settings.pop("CALL", "")
    code = f"""
import json, os, sys, torch, gruyere
library = os.path.join(os.path.dirname(gruyere.__file__), "libgruyere.so")
conf = os.environ.get("GRUYERE_CONF")
{before}
try:
    gruyere.enable({call})
    said = None
except gruyere.GruyereError as error:
    said = str(error)
print(json.dumps(dict(said=said, enabled=gruyere.is_enabled(), reason=gruyere.disable_reason(),
                      conf=os.environ.get("GRUYERE_CONF") == conf)))
"""
    report = installed.code(code, **settings).report
    assert report["said"], "nothing was said"
    for word in words:
        assert word in report["said"]
    if what != "twice":
        assert not report["enabled"] and report["reason"] == report["said"]
        assert report["conf"], "a call that failed has left its settings behind"


def test_without_a_driver_the_variable_lets_a_program_be_and_the_launcher_does_not(
    installed, tmp_path
):
    bare = tmp_path / "libraries"
    bare.mkdir()
    for link in LIBRARIES.iterdir():
        if link.name != "libcuda.so.1":
            (bare / link.name).symlink_to(link.resolve())
    installed.write("program.py", "import torch\nprint(torch.ones(3).sum().item())\n" + SAYS)
    # The phantom is the CUDA runtime too, so it stays; but nobody finds a libcuda.so.1.
    without = {"LD_LIBRARY_PATH": bare}
    ran = installed.python("program.py", GRUYERE_ENABLE=1, **without)
    assert not ran.report["enabled"] and "driver" in ran.report["reason"]
    assert ran.err == ""
    ran = installed.python("-m", "gruyere", "program.py", **without)
    reason = "there is no NVIDIA driver here (libcuda.so.1 was not found)"
    lines = ran.err.splitlines()
    assert (ran.code, lines[0]) == (2, f"gruyere: {reason}: no GPU"), ran.err
    assert len(lines) == 3 and "--stand-in program.py" in lines[2], "and no traceback"
    ran = installed.python("-m", "gruyere", "--doctor", **without)
    assert ran.code == 1 and finding(ran, "gruyere") == f"does not work here: {reason}"


def finding(ran, what):
    """What the doctor says of something."""
    found = [line for line in ran.out.splitlines() if line.startswith(f"{what} ")]
    assert len(found) == 1, ran.out
    return found[0].split(maxsplit=1)[1]


def test_after_the_launch_line_a_call_that_asks_for_no_more_is_fine(installed):
    code = "import gruyere\ngruyere.enable()\ngruyere.enable(limit='90%')\n" + SAYS
    ran = installed.code(code, GRUYERE_ENABLE=1, GRUYERE_CONF="limit:90%")
    assert ran.report["enabled"]
    ran = installed.code(code.replace("90%", "80%"), GRUYERE_ENABLE=1, GRUYERE_CONF="limit:90%")
    assert ran.code == 1
    assert "limit:80%" in ran.err and "GRUYERE_CONF" in ran.err


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torchs_settings_are_honoured_or_named_in_one_line(installed, variable):
    conf = (
        "expandable_segments:True,per_process_memory_fraction:0.5,"
        "roundup_power2_divisions:[256:1,512:2],pinned_use_background_threads:True"
    )
    code = f"{USES_CUDA}{LIBRARY_NUMBERS}{SAYS}\nprint(numbers().limit / numbers().total_memory)"
    ran = installed.code(code, GRUYERE_ENABLE=1, **{variable: conf}).check()
    assert float(ran.out.splitlines()[-1]) == pytest.approx(0.5, abs=0.01)
    (line,) = ran.warnings()
    assert f"{variable}: expandable_segments:True: has no meaning here: it says whether" in line
    assert "per_process_memory_fraction:0.5: is honoured (limit:50%)" in line
    assert "roundup_power2_divisions:[256:1,512:2]: has no meaning here: it rounds sizes" in line
    assert "pinned_use_background_threads:True: applies as before (host memory" in line
    ours = installed.code(
        code, GRUYERE_ENABLE=1, GRUYERE_CONF="limit:75%", **{variable: conf}
    ).check()
    assert float(ours.out.splitlines()[-1]) == pytest.approx(0.75, abs=0.01)
    assert "is overridden by limit" in ours.warnings()[0]
    # One line a node, not one a rank.
    assert (
        installed.code(code, GRUYERE_ENABLE=1, LOCAL_RANK=1, **{variable: conf}).check().warnings()
        == []
    )


def test_the_doctor_does_not_say_that_it_works_where_there_is_no_device(installed):
    ran = installed.python("-m", "gruyere", "--doctor", PHANTOM_DEVICES="0")
    assert ran.code == 1
    assert "works here" not in ran.out
    assert "no device" in finding(ran, "gruyere")


def test_the_doctor_tries_and_tells(installed):
    ran = installed.python(
        "-m", "gruyere", "--doctor", PYTORCH_ALLOC_CONF="max_split_size_mb:64"
    ).check()
    for word in (
        "python",
        "torch",
        "libgruyere.so",
        "works with this interpreter",
        "max_split_size_mb:64",
        "Phantom H100 (stand-in)",
        "the stand-in GPU",
        "works here",
    ):
        assert word in ran.out
    assert ran.err == ""


GRAPH_REGISTER = """
import json, os, warnings
warnings.simplefilter("always")
import torch
capability = os.environ.pop("CAPABILITY", None)
if capability:
    torch.cuda.get_device_capability = lambda *_: (int(capability), 0)
before = os.environ.get("NCCL_GRAPH_REGISTER")
torch.empty(10, device="cuda")
print(json.dumps(dict(before=before, after=os.environ.get("NCCL_GRAPH_REGISTER"))))
"""


@pytest.mark.parametrize(
    ("environment", "before", "after"),
    [
        ({}, None, "0"),
        ({"GRUYERE_CONF": "share:off,backing:stitch"}, None, "0"),
        ({"NCCL_GRAPH_REGISTER": "1"}, "1", "1"),
        ({"GRUYERE_CONF": "backing:stitch,backing:fixed"}, None, None),
        ({"CAPABILITY": "10"}, None, None),
    ],
)
def test_nccl_keeps_no_registrations_of_pages_that_move_where_that_is_unsafe(
    installed, environment, before, after
):
    ended = installed.code(GRAPH_REGISTER, **{"GRUYERE_ENABLE": "1", **environment}).check()
    assert (ended.report["before"], ended.report["after"]) == (before, after)
    assert "NCCL_GRAPH_REGISTER" not in ended.err, "one process has no collectives"


def test_a_program_of_several_ranks_is_told_of_nccls_registrations_once(installed):
    ended = installed.code(
        GRAPH_REGISTER, GRUYERE_ENABLE="1", WORLD_SIZE="2", LOCAL_RANK="0"
    ).check()
    assert ended.err.count("Gruyère has set NCCL_GRAPH_REGISTER=0") == 1
    ended = installed.code(
        GRAPH_REGISTER, GRUYERE_ENABLE="1", WORLD_SIZE="2", LOCAL_RANK="1"
    ).check()
    assert "NCCL_GRAPH_REGISTER" not in ended.err
