"""`gruyere bench --torch` as a user runs it, on the phantom; its numbers against the phantom's
books."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from conftest import COMMAND, GRUYERE, HERE, PHANTOM, ROOT, clean_environment

sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere._bench import compare  # noqa: E402
from gruyere._bench.measure import COMPLETED, OUT_OF_MEMORY, Result  # noqa: E402

ALLOCATORS = ["default", "expandable", "async", "gruyere"]
MIB, GIB = 1 << 20, 1 << 30
# An interpreter without torch.
BARE = sys._base_executable


def bench(folder, *arguments, command=COMMAND, python=sys.executable, words=None, **settings):
    environment = clean_environment() | {
        "GRUYERE_LIBRARY": str(GRUYERE),
        "GRUYERE_PHANTOM": str(PHANTOM),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {key: str(value) for key, value in settings.items()}
    words = words or ["bench", "--torch", "--python", python]
    line = [command, *words, *arguments]
    return subprocess.run(
        [str(word) for word in line],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows(ran, program=0):
    """The rows of a run with `--json -`."""
    document = json.loads(ran.stdout)
    assert (document["schema"], document["version"]) == ("gruyere.bench.torch", 1)
    return document["programs"][program]["rows"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The smallest program under every allocator, once, and the books of every process of it."""
    folder = tmp_path_factory.mktemp("bench")
    ran = bench(
        folder,
        "--stand-in",
        "--program",
        "small",
        "--steps",
        3,
        "--runs",
        1,
        "--json",
        "small.json",
        PHANTOM_BOOKS=folder / "books-%p",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    books = [json.loads(file.read_text()) for file in folder.glob("books-*")]
    return ran, json.loads((folder / "small.json").read_text()), books


def test_the_table_has_every_allocator_and_every_column(compared):
    ran, document, _ = compared
    for word in [
        "small",
        *ALLOCATORS,
        "peak live",
        "peak physical",
        "smallest device",
        "host a step",
        "torch 2.",
    ]:
        assert word in ran.stdout
    assert [row["allocator"] for row in document["programs"][0]["rows"]] == ALLOCATORS
    assert {row["outcome"] for row in document["programs"][0]["rows"]} == {COMPLETED}


def test_peaks_are_those_of_the_books_and_of_the_allocators(compared):
    _, document, books = compared
    found = document["programs"][0]["rows"]
    free = Counter(
        book["devices"][0]["physical_peak"]
        for book in books
        if book["devices"][0]["capacity"] == 80 * GIB
    )
    assert Counter(row["physical_peak"] for row in found) == free
    for row in found:
        # Nobody but the allocator holds memory on the phantom.
        assert row["reserved_peak"] == row["physical_peak"]
        assert row["steps"] == 3
        assert row["hold_ratio"] == row["physical_peak"] / document["programs"][0]["peak_live"] >= 1
    # The program's bytes are the same whoever serves them.
    _, expandable, _, ours = found
    assert (
        expandable["allocated_peak"]
        == ours["allocated_peak"]
        == document["programs"][0]["peak_live"]
    )
    assert all(book["misuse"] == [] for book in books)


def test_the_smallest_device_is_where_the_program_still_completes(compared):
    _, document, books = compared
    live = document["programs"][0]["peak_live"]
    tries = Counter()
    for row in document["programs"][0]["rows"]:
        tries.update(attempt["bytes"] for attempt in row["fit_tries"])
        sizes = {
            outcome: [a["bytes"] for a in row["fit_tries"] if a["outcome"] == outcome]
            for outcome in (COMPLETED, OUT_OF_MEMORY)
        }
        assert row["fit_bytes"] == min(sizes[COMPLETED]) >= live
        assert row["fit_ratio"] == row["fit_bytes"] / live
        below = max(sizes[OUT_OF_MEMORY], default=live - (2 << 20))
        assert 0 < row["fit_bytes"] - below <= max(4 << 20, live // 200)
    # Each was a device of that size, in a process of its own.
    assert (
        Counter(
            book["devices"][0]["capacity"]
            for book in books
            if book["devices"][0]["capacity"] != 80 * GIB
        )
        == tries
    )


def test_host_time_is_told_beside_torchs(compared):
    _, document, _ = compared
    found = document["programs"][0]["rows"]
    assert found[0]["host_ratio"] == 1
    for row in found:
        assert 0.01e6 < row["host_ns_a_step"] < 10e9
        assert row["host_ratio"] > 0


SCRIPT = """
import sys, torch
assert __name__ == "__main__" and sys.argv[1:] == ["--width", "256"], sys.argv
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    model(torch.zeros(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


@pytest.mark.thorough
def test_a_script_is_run_as_it_is_and_ends_after_its_steps(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [
        "--stand-in",
        "--program",
        "train.py",
        "--steps",
        4,
        "--runs",
        1,
        "--allocators",
        "default,gruyere",
        "--no-fit",
        "--json",
        "-",
    ]
    ran = bench(tmp_path, *options, "--", "--width", 256)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    default, ours = rows(ran)
    assert (default["steps"], ours["steps"]) == (4, 4)
    assert 0 < default["requested_peak"] == ours["requested_peak"]
    assert default["fit_bytes"] is None


@pytest.mark.thorough
def test_a_program_that_takes_the_end_after_its_steps_for_an_error_has_completed(tmp_path):
    body = SCRIPT.replace("\n", "\n    ")
    # As IPython does.
    caught = f"try:{body}\nexcept BaseException:\n    raise SystemExit(1)"
    (tmp_path / "train.py").write_text(caught)
    options = "--stand-in --steps 4 --runs 1 --no-fit --json - --allocators gruyere".split()
    ran = bench(tmp_path, *options, "--program", "train.py", "--", "--width", 256)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = rows(ran)
    assert (row["outcome"], row["steps"]) == ("completed", 4)


CHOOSING = """
import os, gruyere
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
gruyere.enable(limit="90%")
""" + SCRIPT


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_script_that_chooses_an_allocator_has_that_of_its_row_and_is_told_once(
    tmp_path, command
):
    (tmp_path / "train.py").write_text(CHOOSING)
    if command == "compare":
        line = [sys.executable, "train.py", "--width", 256]
        ran = bench(tmp_path, "--", *line, words=["compare", "--stand-in"])
    else:
        options = "--stand-in --no-fit --runs 1 --allocators default,gruyere --program train.py"
        ran = bench(tmp_path, *options.split(), "--", "--width", 256)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ignored = "train.py: expandable_segments:True; gruyere.enable(limit='90%'). Each row has the"
    assert " ".join(ran.stdout.split()).count(f"Ignored in {ignored}") == 1, ran.stdout
    if command == "bench":
        legend = ran.stdout[ran.stdout.index("peak live        of") :]
        assert all(len(line) <= 80 for line in legend.splitlines()), legend
        assert "Median of steps; of" in " ".join(legend.split()), "of one run"


# Under Gruyère it does other work than under torch's allocators.
OTHER_WORK = """
import os, torch
ours = os.environ.get("GRUYERE_ENABLE") == "1"
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3 if ours else 5):
    model(torch.zeros(8192 if ours else 4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_runs_of_different_work_have_no_winner(tmp_path, command):
    (tmp_path / "train.py").write_text(OTHER_WORK)
    if command == "compare":
        words = ["compare", "--stand-in", "--json", "all.json"]
        ran = bench(tmp_path, "--", sys.executable, "train.py", words=words)
    else:
        options = "--stand-in --runs 1 --allocators default,gruyere --json all.json --program"
        ran = bench(tmp_path, *options.split(), "train.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (program,) = json.loads((tmp_path / "all.json").read_text())["programs"]
    assert (program["comparable"], program["peak_live"]) == (False, None)
    assert [said[:9] for said in program["differs"]] == ["peak live", "the steps"]
    for row in program["rows"]:
        assert row["outcome"] == COMPLETED
        assert row["hold_ratio"] == row["physical_peak"] / row["allocated_peak"]
        assert row["fit_bytes"] is row["host_ratio"] is None and not row["fit_tries"]
    assert len({row["allocated_peak"] for row in program["rows"]}) == 2
    said = " ".join(ran.stdout.split())
    assert "The runs did different work, so their figures do not compare: peak live was " in said
    assert "and 3 under Gruyère. Seed what" in said
    assert "holds least" not in said and "different work" in ran.stderr


# The first run that finds an empty cache tries kernels on the device.
COMPILING = """
import os, torch
kept = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "kept")
model = torch.nn.Linear(1024, 1024).cuda()
if not os.path.exists(kept):
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    open(kept, "w").close()
    torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
"""
# A block of 6 MiB lies in a segment of 20 MiB, which torch makes anew as a whole.
RESTORING = """
import torch
weight = torch.nn.Parameter(torch.zeros(1 << 18, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept = torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
state = torch._C._cuda_getCheckpointState(0, graph.pool())
for step in range(3):
    torch.empty(STEP << 20, dtype=torch.uint8, device="cuda")
    (weight * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
"""


@pytest.mark.parametrize("program", [COMPILING, RESTORING.replace("STEP", "1")])
def test_what_a_compiler_and_a_restore_take_is_no_other_work(tmp_path, program):
    (tmp_path / "train.py").write_text(program)
    words = ["compare", "--stand-in", "--json", "all.json"]
    ran = bench(tmp_path, "--", sys.executable, "train.py", words=words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (compared,) = json.loads((tmp_path / "all.json").read_text())["programs"]
    assert compared["comparable"] and compared["peak_live"] < 20 << 20, ran.stdout
    peaks = {row["allocated_peak"] for row in compared["rows"]}
    assert len(peaks) > 1 or program == COMPILING, "the restore differs"


def test_other_work_is_told_beside_a_restore_too(tmp_path):
    drawn = "(40 if 'GRUYERE_ENABLE' in __import__('os').environ else 20)"
    (tmp_path / "train.py").write_text(RESTORING.replace("STEP", drawn))
    words = ["compare", "--stand-in"]
    ran = bench(tmp_path, "--", sys.executable, "train.py", words=words)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "different work" in ran.stdout


RESETTING = """
import torch
model = torch.nn.Linear(256, 256).cuda()
kept = torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    pass
del kept
torch.cuda.empty_cache()
RESET
torch.empty(1, device="cuda")
"""
RESETS = {
    "torch.cuda": "torch.cuda.reset_peak_memory_stats()\n"
    "torch.cuda.reset_accumulated_memory_stats()",
    "torch._C": "torch._C._cuda_resetPeakMemoryStats(0)\n"
    "torch._C._cuda_resetAccumulatedMemoryStats(0)",
}


@pytest.mark.parametrize("name", RESETS)
def test_a_program_that_resets_the_peaks_is_measured_whole(tmp_path, name):
    (tmp_path / "train.py").write_text(RESETTING.replace("RESET", RESETS[name]))
    options = "--stand-in --no-fit --runs 1 --json - --allocators default,gruyere --conf"
    ran = bench(tmp_path, *options.split(), "door:pluggable", "--program", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = rows(ran)
    assert len(found) == 3
    for row in found:
        assert row["outcome"] == COMPLETED, row
        for peak in ("allocated_peak", "requested_peak", "reserved_peak"):
            assert 400 * MIB <= row[peak] < 500 * MIB, (peak, row)
        assert row["caught"] == 1, row


CONVOLUTION = """
import torch
x = torch.randn(2, 64, 512, 512, dtype=torch.half, device="cuda")
c = torch.nn.Conv2d(64, 32, 3, padding=1, device="cuda", dtype=torch.half)
with torch.no_grad():
    y = c(x)
"""


def test_a_convolution_is_cudnns_as_in_the_program_by_itself(tmp_path):
    (tmp_path / "train.py").write_text(CONVOLUTION)
    options = "--stand-in --no-fit --runs 1 --json - --allocators default,gruyere --program"
    ran = bench(tmp_path, *options.split(), "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for row in rows(ran):
        # Input and output. Without cuDNN torch unfolds the input, which is nine times as large.
        assert 96 * MIB <= row["allocated_peak"] < 98 * MIB, row


FAILING = {
    "exit": (
        "import torch\ntorch.zeros(1, device='cuda')\nraise SystemExit(3)",
        "failed",
        "exited with 3",
        1,
    ),
    "raise": ("import torch\nraise ValueError('seven')", "failed", "ValueError: seven", 1),
    "killed": (
        "import torch, os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)",
        "failed",
        "killed by SIGKILL: last words",
        1,
    ),
    "crash": (
        "import torch, os\nprint('last words', flush=True)\nos.kill(os.getpid(), 11)",
        "failed",
        "killed by SIGSEGV: Fatal Python error: Segmentation fault",
        1,
    ),
    "no torch": ("print('nothing to do')", "failed", "did not import torch", 1),
    "no cuda": ("import torch\ntorch.zeros(1)", "failed", "used no CUDA memory", 1),
    "another": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
        "failed",
        "its process became another program",
        1,
    ),
    "memory": (
        "import torch\na = [torch.empty(1 << 28, device='cuda') for _ in range(100)]",
        "out of memory",
        "out of memory",
        4,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAILING)
def test_a_script_that_fails_is_a_row_with_the_reason(tmp_path, name):
    code, outcome, reason, status = FAILING[name]
    (tmp_path / "train.py").write_text(code)
    ran = bench(
        tmp_path,
        "--stand-in",
        "--program",
        "train.py",
        "--runs",
        1,
        "--allocators",
        "gruyere",
        "--json",
        "-",
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    (row,) = rows(ran)
    assert row["outcome"] == outcome
    assert reason in row["reason"]
    assert row["reason"] in ran.stderr


@pytest.mark.thorough
def test_a_script_that_hangs_is_ended(tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)")
    ran = bench(
        tmp_path,
        "--stand-in",
        "--program",
        "train.py",
        "--runs",
        1,
        "--allocators",
        "default",
        "--timeout",
        2,
    )
    assert ran.returncode == 1
    assert "took more than 2 s" in ran.stdout


@pytest.mark.thorough
def test_a_device_that_is_too_small_is_out_of_memory_for_every_allocator(tmp_path):
    ran = bench(
        tmp_path,
        "--stand-in",
        "--program",
        "small",
        "--steps",
        2,
        "--runs",
        1,
        PHANTOM_MEMORY="256MiB",
    )
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert ran.stdout.count("OUT OF MEMORY\n") == len(ALLOCATORS)
    assert ran.stdout.count("out of memory: OutOfMemoryError: ") == len(ALLOCATORS)


@pytest.mark.parametrize(
    "torch, reason",
    [
        (None, "torch cannot be imported by"),
        ("__version__ = '1.13.1'", "torch 1.13.1 is too old"),
        (
            "__version__ = '2.11.0'\nclass version:\n    cuda = None",
            "torch 2.11.0 is built without CUDA",
        ),
    ],
)
def test_a_torch_that_cannot_serve_is_said_in_each_row(tmp_path, torch, reason):
    if torch:
        (tmp_path / "torch.py").write_text(torch)
    options = ["--stand-in", "--program", "small", "--json", "-"]
    ran = bench(tmp_path, *options, python=BARE, PYTHONPATH=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = rows(ran)
    assert [row["outcome"] for row in found] == ["failed"] * len(ALLOCATORS)
    assert all(reason in row["reason"] for row in found), found


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--program", "smal"], "--program smal: neither a built-in program (llama, "),
        (["--conf", "slak:1"], "slak"),
        (["--conf", "slack:1%", "--allocators", "default"], "which --allocators leaves out"),
        (["--program", "small", "--", "--epochs", "3"], "arguments after -- are for scripts"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(tmp_path, options, reason):
    ran = bench(tmp_path, "--stand-in", *options)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert reason in ran.stderr
    assert ran.stdout == ""


# A driver whose cuInit fails, and one that shows no device.
DRIVER = """
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int *count) {{ *count = 0; return 0; }}
int cuDeviceGetName(char *name, int length, int device) {{ return 101; }}
int cuGetErrorName(int code, const char **name) {{ *name = "CUDA_ERROR_UNKNOWN"; return 0; }}
"""


@pytest.mark.parametrize(
    ("init", "cause"),
    [
        (None, "there is no NVIDIA driver (libcuda.so.1: "),
        (999, "the driver's cuInit returned 999 (CUDA_ERROR_UNKNOWN)"),
        (0, "the driver shows no device to this process"),
        ("the stand-in", "the driver in this environment is that of the stand-in GPU"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "bench --torch"])
def test_no_program_of_the_users_runs_on_the_stand_in_unasked(tmp_path, init, cause, command):
    """The stand-in is at hand, and three lines at most say how to ask for it."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    library = libraries / "libcuda.so.1"
    if init == "the stand-in":
        library.symlink_to(PHANTOM)
    elif init is not None:
        (tmp_path / "driver.c").write_text(DRIVER.format(init=init))
        call = ["cc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", library]
        subprocess.run(call, check=True)
    (tmp_path / "train.py").write_text("open('was-run', 'w')")
    line = ["compare", "--", sys.executable, "train.py"]
    if command != "compare":
        line = ["bench", "--torch", "--python", sys.executable, "--program", "train.py"]
    settings = {"GRUYERE_PHANTOM": str(PHANTOM), "LD_LIBRARY_PATH": str(libraries)}
    ran = subprocess.run(
        [COMMAND, *line],
        env=clean_environment() | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    lines = ran.stderr.splitlines()
    assert len(lines) <= 3 and lines[0].startswith(
        f"gruyere {command}: no GPU can be used here: {cause}"
    ), lines
    assert "--stand-in" in ran.stderr and "`gruyere dryrun" in ran.stderr
    assert not (tmp_path / "was-run").exists()


def test_beside_a_real_driver_a_comparison_does_not_run_on_the_stand_in(tmp_path):
    (tmp_path / "nvidiactl").touch()
    ran = bench(tmp_path, "--stand-in", "--program", "small", PHANTOM_DEV_FOLDER=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert f"a real GPU's driver ({tmp_path}/nvidiactl)" in ran.stderr
    assert "leave --stand-in out" in ran.stderr


def test_without_the_library_of_the_stand_in_it_says_what_to_do(tmp_path):
    alone = tmp_path / "gruyere"
    shutil.copy(COMMAND, alone)
    alone.chmod(0o755)
    settings = {"command": alone, "PYTHONPATH": ROOT / "python_loader", "GRUYERE_PHANTOM": ""}
    ran = bench(tmp_path, "--stand-in", "--program", "small", **settings)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "the stand-in GPU was not found" in ran.stderr
    assert "cargo build --release -p gruyere-phantom-abi" in ran.stderr
    ran = bench(tmp_path, "--stand-in", **(settings | {"GRUYERE_PHANTOM": tmp_path / "gone.so"}))
    assert ran.returncode == 2 and "gone.so: no such file" in ran.stderr


MIB = 1 << 20


@pytest.mark.parametrize(
    "least", [1000 * MIB, 1004 * MIB, 1010 * MIB, 1234 * MIB, 1500 * MIB, 1600 * MIB]
)
def test_the_search_finds_the_smallest_device_in_few_tries(least):
    row = compare.Row("gruyere", "", physical_peak=1500 * MIB)
    compare.fit(
        row, 1000 * MIB, lambda memory: Result(COMPLETED if memory >= least else OUT_OF_MEMORY)
    )
    assert least <= row.fit_bytes <= least + 5 * MIB
    assert len(row.fit_tries) <= 10


def test_the_search_stops_where_a_run_fails():
    row = compare.Row("gruyere", "", physical_peak=1500 * MIB)
    compare.fit(row, 1000 * MIB, lambda memory: Result("failed", "killed by SIGSEGV"))
    assert (row.outcome, row.fit_bytes, len(row.fit_tries)) == ("failed", None, 1)
    assert row.reason == "on a device of 1.46 GiB: killed by SIGSEGV"


def test_on_a_gpu_the_devices_times_and_what_is_beside_the_allocator_are_read(phantom):
    """The stand-in serves as the GPU: how a script is measured on one."""
    code = """
import ctypes, gpu, torch
gpu.install()
from gruyere._bench import measure, script
from gruyere._sandbox.reach import Reach
measure.stand_in = lambda: None
watch = script.Watch("default", None, None, Reach([]))
watch.imported(torch)
model = torch.nn.Linear(1000, 1000, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    model(torch.ones(10, 1000, device="cuda")).sum().backward()
    optimizer.step()
# Another library's memory, or another process's.
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(100 << 20)) == 0
optimizer.step()
print(watch.result().to_json())
"""
    path = f"{HERE / 'programs'}:{ROOT / 'python_loader'}"
    ran = phantom.run("", code=code, PYTHONPATH=path, PHANTOM_KERNEL_NS=1_000_000)
    result = ran.check().report
    assert (result["outcome"], result["steps"]) == ("completed", 6), result
    assert result["physical_peak"] == result["reserved_peak"] > 0, result
    assert 100 * MIB <= result["beside_peak"] < 110 * MIB, result
    # From step to step, by the device's clock: several kernels of 1 ms.
    assert len(result["step_ns"]) == 5, result
    assert all(time > 2_000_000 for time in result["step_ns"][:4]), result
