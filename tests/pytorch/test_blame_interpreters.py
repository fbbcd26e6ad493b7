"""Where in the program memory comes from, on each version of Python whose frames are known:
without torch, by calls of the library."""

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import (
    GRUYERE,
    HERE,
    LIBRARIES,
    LIBRARIES_PRELOADED,
    RELEASE,
    clean_environment,
    without_the_phantoms_line,
)


def interpreters():
    """Other Pythons of this machine whose frames are known, the newest of each version."""
    found = {}
    for place in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")):
        found[place.parent.parent.name.rsplit(".", 1)[0]] = str(place)
    for minor in range(9, 14):
        path = shutil.which(f"python3.{minor}")
        if path and f"3.{minor}" not in found:
            found[f"3.{minor}"] = path
    known = [f"3.{minor}" for minor in range(9, 14)]
    return [pytest.param(found[name], id=name) for name in known if name in found]


# Without torch: calls that keep the interpreter's lock, and calls that let go of it.
WITHOUT_TORCH = """
import ctypes, os, sys, threading
import sites

MIB = 1 << 20
path = os.environ["GRUYERE_LIBRARY"]
keeps, lets_go = ctypes.PyDLL(path), ctypes.CDLL(path)
for library in (keeps, lets_go):
    library.gruyere_malloc.restype = ctypes.c_void_p
    library.gruyere_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
keeps.gruyere_announce_hooks(3)

class Block:
    def __init__(self, library):
        self.address = library.gruyere_malloc(4 * MIB, 0, None)
    def untyped_storage(self):
        return self
    def data_ptr(self):
        return self.address

def check(block, *expected):
    frames = sites.of(block)["frames"]
    names = [(frame[1].split(".")[-1], frame[2]) for frame in frames]
    assert names[: len(expected)] == list(expected), (names, expected)

def plain(library):
    return Block(
        library
    )
line = plain.__code__.co_firstlineno
assert sites.of(Block(lets_go)) is None, "nobody has compared the frames yet"
assert lets_go.gruyere_blame_begin(None) == -1, "without the lock nothing is compared"
assert keeps.gruyere_blame_begin(None) == 0

for library in (keeps, lets_go):
    init = Block.__init__.__code__.co_firstlineno + 1
    call = line + 1
    now = sys._getframe().f_lineno + 1
    check(plain(library), ("__init__", init), ("plain", call), ("<module>", now))
    # Generators, comprehensions, closures, keyword arguments, exec, a finalizer, a callback of C.
    def generator():
        held = yield
        yield Block(library)
    running = generator()
    next(running)
    check(running.send(1), ("__init__", init), ("generator", sys._getframe().f_lineno - 3))
    def with_cells(*, wanted):
        inner = lambda: (Block(library), wanted)
        return inner()
    block, _ = with_cells(wanted=1)
    check(block, ("__init__", init), ("<lambda>", sys._getframe().f_lineno - 3),
          ("with_cells", sys._getframe().f_lineno - 3))
    made = []
    class Late:
        def __del__(self):
            made.append(Block(library))
    late = Late()
    del late
    check(made[0], ("__init__", init), ("__del__", sys._getframe().f_lineno - 3))
    by_key = sorted([1], key=lambda _: made.append(Block(library)))
    check(made[1], ("__init__", init), ("<lambda>", sys._getframe().f_lineno - 1))
    scope = {"Block": Block, "library": library}
    exec(compile("\\n\\nblock = Block(library)", "<text>", "exec"), scope)
    check(scope["block"], ("__init__", init), ("<module>", 3))
    # While the profiler and the tracer of the program are on, lines are those that run.
    sys.settrace(lambda *arguments: None)
    traced = plain(library)
    sys.settrace(None)
    check(traced, ("__init__", init), ("plain", call))
    threads = []
    def on_a_thread():
        threads.append(Block(library))
    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    check(threads[0], ("__init__", init), ("on_a_thread", sys._getframe().f_lineno - 4))
lets_go.gruyere_blame_end()
assert sites.of(Block(keeps)) is None, "after the end nothing is read"
"""


def run_without_torch(phantom, python, code, **settings):
    script = phantom.folder / "without_torch.py"
    script.write_text(code)
    environment = clean_environment() | {
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "LD_PRELOAD": LIBRARIES_PRELOADED,
        "PYTHONPATH": str(HERE / "programs"),
        "GRUYERE_LIBRARY": str(GRUYERE),
        "GRUYERE_CONF": "blame:large",
        "GRUYERE_TEST_SITES": str(RELEASE / "examples" / "sites"),
        **settings,
    }
    ran = subprocess.run([python, script], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert without_the_phantoms_line(ran.stderr) == "", ran.stderr


@pytest.mark.parametrize("python", interpreters())
def test_frames_of_each_version_of_python_are_those_that_it_says_itself(phantom, python):
    run_without_torch(phantom, python, WITHOUT_TORCH)


# An embedder may hand a thread's state over to another thread, and allocate meanwhile without the
# lock. Python's functions are declared here, so that no version's headers are needed.
HANDED_OVER = r"""
#include <pthread.h>
#include <stdatomic.h>
void *PyGILState_GetThisThreadState(void);
void PyEval_RestoreThread(void *);
void *PyEval_SaveThread(void);
int PyRun_SimpleStringFlags(const char *, void *);
typedef void *(*Malloc)(long, int, void *);
typedef void (*Free)(void *, long, int, void *);
static atomic_int is_over;
static void *state;
static const char *text;
static void *run(void *_) {
    PyEval_RestoreThread(state);
    PyRun_SimpleStringFlags(text, 0);
    state = PyEval_SaveThread();
    is_over = 1;
    return 0;
}
/* How many were allocated while the other thread ran; `first`: before it did. */
long hand_over(void *allocate, void *release, const char *code, void **first) {
    pthread_t thread;
    long count = 0;
    state = PyGILState_GetThisThreadState();
    text = code;
    *first = ((Malloc)allocate)(5 << 20, 0, 0);
    pthread_create(&thread, 0, run, 0);
    for (; !is_over; count++)
        ((Free)release)(((Malloc)allocate)(4 << 20, 0, 0), 4 << 20, 0, 0);
    pthread_join(thread, 0);
    return count;
}
"""

HANDS_OVER = """
import ctypes, os, sys
import sites
path = os.environ["GRUYERE_LIBRARY"]
keeps, lets_go = ctypes.PyDLL(path), ctypes.CDLL(path)
keeps.gruyere_announce_hooks(3)
assert keeps.gruyere_blame_begin(None) == 0
handed = ctypes.CDLL(os.environ["HANDED_OVER"])
handed.hand_over.restype = ctypes.c_long
# Deep and shallow stacks, of code that goes away, with pauses in which the state runs nowhere.
OTHER = b'''
import sys, time
sys.setrecursionlimit(20000)
def deep(depth):
    return 0 if depth == 0 else 1 + deep(depth - 1)
end = time.monotonic() + 0.7
number = 0
while time.monotonic() < end:
    number += 1
    text = "def g(n): return 0 if n == 0 else 1 + g(n - 1)\\\\ng(%d)" % (number * 37 % 900)
    exec(compile(text, "<made %d>" % number, "exec"), {})
    deep(number * 101 % 3000)
    if number % 50 == 0:
        time.sleep(0.0001)
'''
first = ctypes.c_void_p()
class First:
    def untyped_storage(self):
        return self
    def data_ptr(self):
        return first.value
def outer():
    functions = [getattr(lets_go, f"gruyere_{name}") for name in ("malloc", "free")]
    return handed.hand_over(*functions, OTHER, ctypes.byref(first))
count = outer()
assert count > 1000, count
# While the state was its own, this thread's lines were known; later those, or none.
frames = sites.of(First())["frames"]
assert [frame[1] for frame in frames] == ["outer", "<module>"], frames
(table,) = [line for line in sites.read() if line["kind"] == "table"]
assert table["sites"] <= 2, table
"""


@pytest.mark.parametrize("python", interpreters())
def test_a_thread_whose_state_runs_on_another_one_reads_no_frames_of_it(phantom, python):
    source = phantom.folder / "handed_over.c"
    source.write_text(HANDED_OVER)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    run_without_torch(phantom, python, HANDS_OVER, HANDED_OVER=str(library))


# As templates, notebooks and exec'd settings make code: a file's name each, or a line each.
GENERATES = """
import ctypes, os
import sites
path = os.environ["GRUYERE_LIBRARY"]
keeps = ctypes.PyDLL(path)
keeps.gruyere_malloc.restype = ctypes.c_void_p
keeps.gruyere_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
keeps.gruyere_announce_hooks(3)
assert keeps.gruyere_blame_begin(None) == 0
wanted, codes = {}, []
def make(file, line):
    code = compile("\\n" * (line - 1) + "address = allocate(2 << 20, 0, None)", file, "exec")
    scope = {"allocate": keeps.gruyere_malloc}
    exec(code, scope)
    wanted[scope["address"]] = [file, line]
    codes.append(id(code))
for number in range(100):
    make(f"/made/file{number:04}.py", 1)
for line in range(1, 101):
    make("<string>", line)
assert len(set(codes)) < len(codes), "no address was used again"
lines = sites.read()
told = {line["address"]: line["site"]["frames"][0] for line in lines if line["kind"] == "block"}
wrong = [(told[at], is_so) for at, is_so in wanted.items() if [told[at][0], told[at][2]] != is_so]
assert not wrong, (len(wrong), wrong[0])
"""


@pytest.mark.parametrize("python", interpreters())
def test_generated_code_at_the_address_of_other_code_has_its_own_file_and_line(phantom, python):
    run_without_torch(phantom, python, GENERATES)


def test_there_are_interpreters_to_be_tried():
    assert interpreters(), "no Python of 3.9 to 3.13 was found beside this one"
