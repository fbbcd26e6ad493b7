"""What Gruyère does for somebody who has no GPU: it says so in few words, names what can be done,
and runs the program on the stand-in without harm."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from conftest import (
    COMMAND,
    GRUYERE,
    HERE,
    LIBRARIES,
    LIBRARIES_PRELOADED,
    PHANTOM,
    ROOT,
    SHIM,
    clean_environment,
)

TRAIN = """
import sys, torch
torch.backends.cudnn.enabled = False
with open("model.pt", "w") as file:
    file.write("ours")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    print("stepped", step + 1, *sys.argv[1:])
print("the end")
"""


class User:
    """Somebody in a folder with a program and a checkpoint."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        (folder / "model.pt").write_text("theirs")

    def python(self, *words, flags=(), stdin=None, without="", **settings):
        """`without`: system calls that the kernel refuses (without_calls.py)."""
        refusing = [sys.executable, HERE / "without_calls.py", without] if without else []
        return subprocess.run(
            [*refusing, sys.executable, *flags, "-m", "gruyere", *words],
            env=self.environment(**settings),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            input=stdin,
        )

    def start(self, *words, **settings):
        return subprocess.Popen(
            [sys.executable, "-m", "gruyere", *words],
            env=self.environment(**settings),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @staticmethod
    def environment(**settings):
        return clean_environment() | {
            "PYTHONPATH": str(ROOT / "python_loader"),
            "GRUYERE_LIBRARY": str(GRUYERE),
            "GRUYERE_PHANTOM": str(PHANTOM),
            **SHIM,
            **settings,
        }


@pytest.fixture
def user(tmp_path):
    return User(tmp_path)


# The torch of the tests can't be imported without the stand-in's libraries: the GPU is hidden.
NO_GPU = {
    "LD_PRELOAD": LIBRARIES_PRELOADED,
    "LD_LIBRARY_PATH": str(LIBRARIES),
    "CUDA_VISIBLE_DEVICES": "",
}


def test_stand_in_runs_some_steps_of_the_program_and_keeps_no_file(user):
    before = sorted(os.listdir(user.folder))
    ran = user.python("--stand-in", "train.py", "--lr", "3", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "stepped 11 --lr 3", "the 12th step ends it"
    said = ran.stderr.splitlines()
    assert [line for line in said if "stand-in GPU" in line] == said[:1], ran.stderr
    assert said[0].startswith("gruyere: up to 12 steps of train.py") and len(said[0]) <= 80
    assert said[-1].startswith("gruyere: peak live "), "what it took is what one runs it for"
    shown = f"{os.path.basename(sys.executable)} train.py --lr 3"
    assert said[-1].endswith(f"gruyere compare --stand-in -- {shown}"), said[-1]
    assert sorted(os.listdir(user.folder)) == before
    assert (user.folder / "model.pt").read_text() == "theirs"


def test_a_name_that_a_terminal_would_obey_is_shown_without_its_commands(user):
    name = "a\x1b[31m\nb.py"
    (user.folder / name).write_text("import torch\n")
    ran = user.python("--stand-in", name, CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stderr, ran.stderr
    assert ran.stderr.startswith("gruyere: up to 12 steps of a [31m b.py on a stand-in GPU")


def test_a_rank_of_a_launcher_is_refused_with_the_line_that_starts_all_in_one_sandbox(user):
    ran = user.python("--stand-in", "train.py", RANK="1", WORLD_SIZE="2")
    assert ran.returncode == 2, ran.stderr
    line = (
        "PHANTOM_DEVICES=2 python -m gruyere --stand-in --steps all -m torch.distributed.run "
        "--nproc-per-node 2 train.py"
    )
    assert ran.stderr.rstrip().endswith(line), ran.stderr


# The ranks end by `_exit`: threads of autograd's and gloo's may still drop what they ran with, for
# which they ask for Python's lock, and Python's end aborts the process for that (torch 2.11 with
# Python 3.11 alone, without Gruyère, on a busy machine: one run in three).
RANKS = """
import os, sys, torch
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
print(f"rank {rank} is done\\n", end="")
sys.stdout.flush()
os._exit(0)
"""


def test_several_ranks_run_in_one_sandbox_with_gloo_and_a_device_each(user):
    """The line of docs/pytorch.md."""
    (user.folder / "train.py").write_text(RANKS)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    ran = user.python("--stand-in", "--steps", "all", *launch, PHANTOM_DEVICES="2")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "rank 0 is done", "rank 1 is done"]


def test_a_program_on_the_stand_in_shares_no_memory_with_others(user):
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="gruyere-test-") as theirs:
        code = f"""
        import os, torch
        torch.empty(1, device="cuda")
        assert not os.path.exists({theirs.name!r})
        open({theirs.name!r} + "-new", "w").close()
        """
        ran = user.python(
            "--stand-in", "-c", textwrap.dedent(code), GRUYERE_RECORD_DIR="/dev/shm"
        )
        assert ran.returncode == 0, ran.stderr
        name = os.path.basename(theirs.name)
        assert [each for each in os.listdir("/dev/shm") if each.startswith(name)] == [name]


def test_a_record_on_the_stand_in_is_seen_while_the_program_runs_and_its_folder_goes(
    user, tmp_path_factory
):
    records = tmp_path_factory.mktemp("records")
    code = "import time, torch; torch.empty(1, device='cuda'); time.sleep(300)"
    with user.start("--stand-in", "-c", code, GRUYERE_RECORD_DIR=str(records)) as process:
        deadline = time.monotonic() + 200
        while not listed(records)["processes"]:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    # Its program was killed.
    (record,) = records.iterdir()
    assert record.suffix == ".record"
    told = listed(records)
    assert told["processes"] == [] and len(told["dead"]) == 1


def listed(records):
    """What `gruyere ps` finds there."""
    words = [COMMAND, "ps", "--json", "--directory", records]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_what_gruyere_writes_on_the_stand_in_is_kept(user, tmp_path_factory):
    records, dumps = (tmp_path_factory.mktemp(name) for name in ("records", "dumps"))
    code = "import torch; torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    ran = user.python(
        "--stand-in", "-c", code, PHANTOM_MEMORY="64MiB", GRUYERE_RECORD_DIR=str(records),
        GRUYERE_CONF=f"dump_dir:{dumps}",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    (page,) = dumps.glob("*.html")
    assert f"The page: {page}" in ran.stderr, ran.stderr
    pid = ran.stderr.partition("gruyere post ")[2].split("`")[0]
    (record,) = records.iterdir()
    assert f"-{pid}-" in record.name


@pytest.mark.parametrize("key", ["dump_dir", "history"])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_missing_folder_that_gruyere_is_to_write_to_is_made_and_kept(user, key, is_relative):
    """As without the stand-in: with the rights that the umask leaves."""
    before = sorted(os.listdir(user.folder))
    code = """
import os, torch
kept = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
for name in ("new", "model.pt"):
    path = os.path.join(name, "theirs") if os.path.isdir(name) else name
    open(path, "w").write("ours")
torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
"""
    folder = user.folder / "new" / "inner"
    named = folder.relative_to(user.folder) if is_relative else folder
    (user.folder / "program.py").write_text(code)
    settings = {"PHANTOM_MEMORY": "64MiB", "GRUYERE_CONF": f"{key}:{named}"}
    ran = user.python("--stand-in", "program.py", **settings)
    assert ran.returncode == 1 and "OutOfMemoryError" in ran.stderr, ran.stderr
    written = os.listdir(folder)
    assert any(name.endswith(".html") for name in written) == (key == "dump_dir"), ran.stderr
    assert written, ran.stderr
    (user.folder / "plain").mkdir()
    for made in (folder, folder.parent):
        assert made.stat().st_mode == (user.folder / "plain").stat().st_mode
    assert os.listdir(folder.parent) == ["inner"], "what the program writes beside it is not kept"
    assert (user.folder / "model.pt").read_text() == "theirs"
    assert sorted(os.listdir(user.folder)) == sorted([*before, "new", "plain", "program.py"])


@pytest.mark.parametrize("forbidden", ["", "unshare"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_trace_on_the_stand_in_is_kept_and_nothing_beside_it(user, forbidden, by_variable):
    before = {"train.py", "model.pt", "run-0.trace.zst"}
    (user.folder / "run-0.trace.zst").write_text("an earlier one")
    option = [] if by_variable else ["--trace", "run-%r.trace.zst"]
    settings = {"GRUYERE_CONF": "trace:run-%r.trace.zst"} if by_variable else {}
    ran = user.python("--stand-in", *option, "train.py", without=forbidden, **settings)
    assert ran.returncode == 0, ran.stderr
    assert set(os.listdir(user.folder)) == before
    assert (user.folder / "model.pt").read_text() == "theirs"
    with open(user.folder / "run-0.trace.zst", "rb") as file:
        assert file.read(4) == b"\x28\xb5\x2f\xfd", "zstd"


def test_a_trace_that_could_not_be_kept_is_refused_before_anything_runs(user):
    ran = user.python("--stand-in", "--trace", "no/run.zst", "train.py")
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert f"there is no folder {user.folder / 'no'}; make it first" in ran.stderr


def test_a_call_that_asks_for_more_than_the_launch_line_names_the_option_to_give_there(user):
    words = ("-c", "import torch, gruyere; gruyere.enable(limit='90%')")
    ran = user.python("--stand-in", *words)
    assert ran.returncode == 1 and "python -m gruyere --limit 90% ..." in ran.stderr, ran.stderr
    assert "summary" not in ran.stderr, "nobody has set it"
    ran = user.python("--stand-in", "--limit", "90%", *words)
    assert ran.returncode == 0, ran.stderr


def test_a_misspelt_option_is_named_as_it_was_typed(user):
    ran = user.python("--limt", "90%", "train.py")
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("gruyere: --limt 90%: unknown key; did you mean limit?")
    ran = user.python("--limit", "90%", "train.py", GRUYERE_CONF="limt:90%")
    assert ran.stderr.startswith('gruyere: GRUYERE_CONF: "limt:90%": unknown key'), ran.stderr


def test_the_help_fits_a_terminal(user):
    ran = user.python("--help")
    assert [line for line in ran.stdout.splitlines() if len(line) > 80] == []


def test_on_the_stand_in_each_setting_is_shown_once(user):
    code = "import os, torch; print(os.environ['GRUYERE_CONF'])"
    ran = user.python("--stand-in", "--dump-dir", "dumps", "-c", code, GRUYERE_CONF="dump_dir:d")
    assert ran.stdout.strip() == f"summary:on,dump_dir:{user.folder / 'dumps'}", ran.stderr


@pytest.mark.parametrize("forbidden", ["", "unshare"])
def test_the_page_that_the_output_names_is_there_also_in_a_sandbox_of_links(user, forbidden):
    code = "import torch; torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    words = ("--stand-in", "--dump-dir", "new/inner", "-c", code)
    ran = user.python(*words, without=forbidden, PHANTOM_MEMORY="64MiB")
    assert ran.returncode == 1, ran.stderr
    (named,) = [line for line in ran.stderr.splitlines() if line.startswith("The page: ")]
    (page,) = (user.folder / "new" / "inner").glob("*.html")
    assert named == f"The page: {page}", ran.stderr


def test_a_folder_in_which_nothing_was_written_is_not_left(user):
    before = sorted(os.listdir(user.folder))
    ran = user.python("--stand-in", "-c", "import torch", GRUYERE_CONF="dump_dir:new/inner")
    assert ran.returncode == 0, ran.stderr
    assert sorted(os.listdir(user.folder)) == before


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(user):
    ran = user.python("--stand-in", "train.py", GRUYERE_CONF="dump_dir:model.pt/dumps")
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert ran.stderr.startswith("gruyere: --stand-in: dump_dir:model.pt/dumps: the folder cannot")
    assert f"({user.folder / 'model.pt'}: Not a directory)" in ran.stderr
    assert (user.folder / "model.pt").read_text() == "theirs"


def test_a_program_on_standard_input_runs_on_the_stand_in_with_its_arguments(user):
    code = "import sys, torch; print(sys.argv, torch.ones(2, device='cuda').device)"
    ran = user.python("--stand-in", "--steps", "all", "-", "--lr", "3", stdin=code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "['-', '--lr', '3'] cuda:0\n"
    assert ran.stderr.startswith("gruyere: all steps of standard input on a stand-in GPU")


def test_a_program_that_asks_its_empty_stdin_is_told_what_to_do(user):
    remedy = "gruyere: --stand-in: The program's stdin is empty here: pass what it asks for as "
    ran = user.python("--stand-in", "-c", "input('which? ')", stdin="the first\n")
    assert ran.returncode == 1 and "EOFError: EOF when reading a line\n" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith(remedy), ran.stderr
    other = user.python("--stand-in", "-c", "import pickle; pickle.loads(b'')")
    assert other.returncode == 1 and "EOFError" in other.stderr and remedy not in other.stderr


def test_stand_in_ends_as_the_program_ends(user):
    ran = user.python("--stand-in", "--steps", "all", "--summary", "off", "train.py")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "the end"), ran.stderr
    assert "peak live" not in ran.stderr
    code = "import sys; assert sys.flags.optimize == 1; sys.exit(7)"
    assert user.python("--stand-in", "-c", code, flags=["-O"]).returncode == 7
    code = "import os; os.kill(os.getpid(), 11)"
    assert user.python("--stand-in", "-c", code).returncode == 128 + 11


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--stand-in"], "no program was named"),
        (["--stand-in", "--steps", "0", "train.py"], "--steps 0: expected a number of steps, or"),
        (["--steps", "3", "train.py"], "--steps 3: only valid together with --stand-in"),
        (["--stand-in", "--doctor"], "--stand-in: runs a program, but --doctor does not run one"),
    ],
)
def test_stand_in_refuses_what_it_cannot_do_in_the_words_of_the_command(user, words, reason):
    ran = user.python(*words)
    assert ran.returncode == 2 and reason in ran.stderr.splitlines()[0], ran.stderr
    assert "Traceback" not in ran.stderr


def test_stand_in_is_refused_beside_a_real_driver(user, tmp_path):
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia0").touch()
    ran = user.python("--stand-in", "train.py", PHANTOM_DEV_FOLDER=str(devices))
    assert ran.returncode == 2 and "leave --stand-in out" in ran.stderr, ran.stderr
    assert ran.stdout == ""


def test_without_a_gpu_three_lines_say_so_and_what_can_be_done(user):
    ran = user.python("train.py", "--lr", "3", **NO_GPU)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    said = ran.stderr.splitlines()
    assert len(said) == 3 and max(map(len, said)) <= 80, said
    for way in ("dryrun train.py", "compare --stand-in train.py", "-m gruyere --stand-in train.py"):
        assert way in ran.stderr, said


# A library that says something else where torch cannot be imported, as transformers does.
LAZY = """
try:
    import torch
except Exception as error:
    raise ModuleNotFoundError("Could not import module 'Trainer'") from error
"""
# Programs that do without torch where it cannot be imported, and that try again.
WITHOUT = """
try:
    import torch
except Exception:
    torch = None
print("goes on")
"""
STUBBORN = """
for _ in range(2):
    try:
        import torch
        print("goes on with torch")
    except:
        pass
"""
IN_A_THREAD = """
import threading
def work():
    import torch
    print("goes on with torch")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    "code", [LAZY, WITHOUT, STUBBORN, IN_A_THREAD], ids=["lazy", "without", "stubborn", "thread"]
)
def test_without_a_gpu_no_program_goes_on_with_an_import_that_it_catches(user, code):
    (user.folder / "program.py").write_text(code)
    ran = user.python("program.py", **NO_GPU)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    said = ran.stderr.splitlines()
    assert len(said) == 3 and said[0].startswith("gruyere: CUDA_VISIBLE_DEVICES=''"), ran.stderr


@pytest.mark.parametrize(
    "setting, said",
    [
        (("GRUYERE_CONF", "limt:9"), '"limt:9": unknown key'),
        (("GRUYERE_ENABLE", "maybe"), "gruyere: GRUYERE_ENABLE=maybe: expected 1 or 0"),
    ],
)
def test_a_wrong_setting_of_the_programs_ends_it_at_the_import_with_the_reason(user, setting, said):
    code = f"import os\nos.environ[{setting[0]!r}] = {setting[1]!r}\n{LAZY}"
    (user.folder / "program.py").write_text(code)
    ran = user.python("--stand-in", "program.py")
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert said in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_traceback_on_the_stand_in_is_the_programs_alone(user, by_trainer):
    """Where Gruyère wraps functions of torch, and imports them, too; and in the causes."""
    code = """
import torch
GIB = 1 << 30
class Wanted(Exception):
    pass
def joined():
    return torch.cat([torch.empty(GIB, device="cuda", dtype=torch.uint8)] * 2)
def caught():
    try:
        joined()
    except torch.OutOfMemoryError as error:
        raise Wanted from error
caught()
"""
    if by_trainer:
        (user.folder / "outer.py").write_text("import inner\n")
        (user.folder / "inner.py").write_text(code)
        code = "import outer\n"
    (user.folder / "program.py").write_text(code)
    ran = user.python("--stand-in", "program.py", PHANTOM_MEMORY="2GiB")
    assert ran.returncode == 1 and "OutOfMemoryError" in ran.stderr, ran.stderr
    assert str(ROOT / "python_loader") not in ran.stderr, ran.stderr
    assert "in joined" in ran.stderr and "in caught" in ran.stderr
    assert "torch.cat" in ran.stderr


def test_a_call_that_fails_shows_where_in_gruyere_it_does(user):
    code = "import torch, gruyere\ngruyere.enable(limit='90%')\n"
    ran = user.python("--stand-in", "-c", code)
    assert ran.returncode == 1 and "in _check_again" in ran.stderr, ran.stderr
    assert "_launch.py" not in ran.stderr, ran.stderr


def test_without_a_driver_its_file_is_named(user):
    """As torch's import would ask, had this torch the libraries that it needs without a GPU."""
    code = "from gruyere import _enable; print(_enable._no_device(None))"
    asked = user.python("-c", code)
    assert asked.stdout == "there is no NVIDIA driver here (libcuda.so.1 was not found)\n"


def test_the_doctor_names_the_door_and_the_ways_without_a_gpu(user, tmp_path):
    ran = user.python("--doctor", **NO_GPU)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = dict(line.split(maxsplit=1) for line in ran.stdout.splitlines() if line[0] != " ")
    assert found["door"].startswith("native (door:auto)")
    assert found["gruyere"].startswith("does not work here: CUDA_VISIBLE_DEVICES='' hides every")
    for way in ("records and traces", "dryrun", "compare --stand-in", "-m gruyere --stand-in"):
        assert way in ran.stdout, ran.stdout
    assert not any(word in ran.stdout.lower() for word in ("pluggable", "error")), ran.stdout
    # The same torch, and nothing to build or to take the shim from.
    without = {**NO_GPU, "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    ran = user.python("--doctor", **without)
    said = "door                  pluggable (the native door is not available"
    assert said in ran.stdout, ran.stdout


def test_the_doctor_says_so_where_torch_is_not_whole(user):
    """The torch of the tests without the libraries that it is linked with."""
    ran = user.python("--doctor")
    assert ran.returncode == 1 and ran.stderr == "", ran.stderr
    assert "cannot be imported: " in ran.stdout and "does not work here: torch" in ran.stdout
