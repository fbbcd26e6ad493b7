"""Where in the program memory comes from: frames, module and phase of each large block and each
slab, on the real torch, by both doors."""

import subprocess

import pytest

from conftest import GRUYERE, HERE, RELEASE, ROOT, SHIM

PRELUDE = """
import atexit, ctypes, gc, json, os, sys, threading, time
import torch
import gruyere, sites
torch.backends.cudnn.enabled = False
gruyere.enable(door=os.environ["DOOR"])
assert gruyere._enable.door()[0] == os.environ["DOOR"], gruyere._enable.door()
MIB = 1 << 20
def tensor(bytes):
    return torch.empty(bytes, dtype=torch.uint8, device="cuda")
"""


@pytest.fixture(params=["native", "pluggable"])
def door(request):
    return request.param


def run(phantom, door, code, check=True, conf=None, **settings):
    settings |= {
        "PYTHONPATH": f"{HERE / 'programs'}:{ROOT / 'python_loader'}",
        "GRUYERE_LIBRARY": GRUYERE,
        "GRUYERE_TEST_SITES": RELEASE / "examples" / "sites",
        "DOOR": door,
        **SHIM,
    }
    if conf:
        settings["GRUYERE_CONF"] = conf
    script = phantom.folder / "train.py"
    script.write_text(PRELUDE + code)
    launch = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    ran = phantom.run(None, code=launch, allocator="door", **settings)
    return ran.check() if check else ran


def test_a_large_block_has_the_line_that_made_it_and_those_that_called_it(phantom, door):
    run(phantom, door, code="""
def make():
    return tensor(4 * MIB), sites.here()
def call():
    made = make(); return *made, sites.here()
block, inner, outer = call()
site = sites.of(block)
frames = site["frames"]
# `tensor` is the innermost, then those that called it.
assert frames[0][1] == "tensor" and frames[0][0].endswith("train.py"), frames
assert frames[1:3] == [inner, outer], (frames, inner, outer)
assert frames[3][1] == "<module>", frames
assert site["module"] == "" and site["phase"] == "unknown", site
""")


def test_a_slab_has_the_line_that_made_it(phantom, door):
    run(phantom, door, code="""
def small():
    return tensor(1000)
block = small()
assert [frame[1] for frame in sites.of(block)["frames"][:2]] == ["tensor", "small"]
lines = [line for line in sites.read() if line["kind"] == "block"]
assert [line["site"] for line in lines] == ["none"], lines
""")


def test_with_all_a_small_block_has_its_own_line(phantom, door):
    run(phantom, door, conf="blame:all", code="""
def first():
    return tensor(1000)
def second():
    return tensor(1000)
blocks = [first(), second()]
assert [sites.of(block)["frames"][1][1] for block in blocks] == ["first", "second"]
""")


@pytest.mark.parametrize("conf", ["blame:off", "record:off"])
def test_switched_off_nobody_asks(phantom, door, conf):
    run(phantom, door, conf=conf, code="""
blocks = [tensor(4 * MIB), tensor(1000)]
if "record:off" not in os.environ["GRUYERE_CONF"]:
    assert all(line["site"] == "none" for line in sites.read() if line["kind"] != "table")
""")


def test_a_module_has_its_path_and_the_phase_is_forward(phantom, door):
    run(phantom, door, code="""
class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(1024, 1024)
    def forward(self, x):
        made.append(tensor(4 * MIB))
        return self.up(x)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Mlp() for _ in range(3))
    def forward(self, x):
        made.append(tensor(4 * MIB))
        for layer in self.layers:
            x = layer(x)
        return x
made = []
model = Model().cuda()
out = model(torch.empty(2048, 1024, device="cuda"))
assert [sites.of(block)["module"] for block in made] == [
    "Model", "layers.0", "layers.1", "layers.2"]
site = sites.of(out)
assert site["module"] == "layers.2.up" and site["phase"] == "forward", site
# torch's own frames between a module's call and its forward say nothing that the path does not.
names = [frame[1].split(".")[-1] for frame in site["frames"]]
assert names[:3] == ["forward", "forward", "forward"] and names[3] == "<module>", site
""")


def test_a_module_at_the_address_of_one_that_is_gone_is_not_misnamed(phantom, door):
    run(phantom, door, code="""
class Leaf(torch.nn.Module):
    def forward(self):
        return tensor(4 * MIB)
class Whole(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, Leaf())
    def forward(self):
        return next(self.children())()
seen = {}
reused = 0
for number in range(200):
    whole = Whole(f"leaf{number}")
    leaf = next(whole.children())
    reused += id(leaf) in seen
    seen[id(leaf)] = number
    # Compiled anew, so that it is not the hash of the stack that tells them apart.
    block = whole()
    if number % 20 == 19:
        assert sites.of(block)["module"] == f"leaf{number}"
    del whole, leaf, block
assert reused > 0
copy = __import__("copy").deepcopy(torch.nn.Sequential(Leaf(), torch.nn.Sequential(Leaf()))).cuda()
assert sites.of(copy[1][0]())["module"] == "Sequential[1].0"
""")


def test_the_optimisers_state_is_the_optimisers(phantom, door):
    run(phantom, door, code="""
weight = torch.nn.Parameter(torch.empty(1024, 1024, device="cuda"))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.empty_like(weight)
def train():
    optimizer.step()
train()
site = sites.of(optimizer.state[weight]["exp_avg"])
assert site["phase"] == "optimizer", site
assert "train" in [frame[1] for frame in site["frames"]], site
""")


def test_a_backward_has_its_node_and_the_line_of_its_forward(phantom):
    run(phantom, "native", code="""
first = torch.empty(1024, 2048, device="cuda", requires_grad=True)
second = torch.empty(2048, 4096, device="cuda", requires_grad=True)
class Double(torch.nn.Module):
    def forward(self, x):
        return x.mm(second)
model = torch.nn.Sequential(Double()).cuda()
def loss_of():
    out = model(first)
    return out.exp().sum()
loss = loss_of()
grads = torch.autograd.grad(loss, [first, second])
for grad in grads:
    site = sites.of(grad)
    assert site["frames"] == [["autograd", "MmBackward0", 0]], site
    assert site["phase"] == "backward", site
    forward = site["forward"]
    assert [frame[1] for frame in forward["frames"][:2]] == ["Double.forward", "Sequential.forward"]
    assert forward["frames"][0][2] == Double.forward.__code__.co_firstlineno + 1, forward
    assert (forward["phase"], forward["module"]) == ("forward", "Sequential[0]"), forward
# What is computed again in the backward is the backward's, and has its own lines.
from torch.utils.checkpoint import checkpoint
kept = []
def again(x):
    kept.append(tensor(4 * MIB))
    return x.mm(second)
checkpoint(again, first, use_reentrant=False).sum().backward()
one, two = [sites.of(block) for block in kept]
assert [one["phase"], two["phase"]] == ["unknown", "backward"], (one, two)
assert [site["frames"][1][1] for site in (one, two)] == ["again", "again"]
# On the thread that calls it too.
with torch.autograd.set_multithreading_enabled(False):
    (grad,) = torch.autograd.grad(loss_of(), [first])
site = sites.of(grad)
names = [frame[1] for frame in site["frames"]]
assert names[0] == "MmBackward0" and "_engine_run_backward" in names, names
assert site["forward"]["frames"][0][1] == "Double.forward", site
""")


def test_an_operator_in_place_leaves_its_number_to_no_block_that_comes_after_it(phantom):
    run(phantom, "native", code="""
weight = torch.empty(1024, 2048, device="cuda", requires_grad=True)
gradient = torch.empty_like(weight)
kept = []
def loss_of():
    out = weight * 1.5
    out.relu_()
    unrelated = tensor(6 * MIB)
    out.grad_fn.register_hook(lambda made, _: kept.append(made[0]))
    return out
out = loss_of()
out.backward(gradient)
site = sites.of(kept[0])
assert site["frames"] == [["autograd", "ReluBackward0", 0]], site
assert site["phase"] == "backward" and site.get("forward") is None, site
(grad,) = torch.autograd.grad(loss_of().exp().sum(), [weight])
forward = sites.of(grad)["forward"]
start = loss_of.__code__.co_firstlineno
assert forward["frames"][0][1:] == ["loss_of", start + 1], forward
""")


def test_by_the_pluggable_door_a_thread_that_runs_no_python_has_no_site(phantom):
    run(phantom, "pluggable", code="""
weight = torch.empty(1024, 2048, device="cuda", requires_grad=True)
other = torch.empty(2048, 4096, device="cuda", requires_grad=True)
grad, _ = torch.autograd.grad(weight.mm(other).sum(), [weight, other])
assert sites.of(grad) is None, sites.of(grad)
""")


BESIDE = r"""
#include <pthread.h>
typedef void *(*Malloc)(long, int, void *);
static void *made;
static void *run(void *allocate) {
    made = ((Malloc)allocate)(4 << 20, 0, 0);
    return 0;
}
void *allocate_beside(void *allocate) {
    pthread_t thread;
    pthread_create(&thread, 0, run, allocate);
    pthread_join(thread, 0);
    return made;
}
"""


def test_a_thread_without_python_waits_for_nobody_and_has_no_site(phantom, door):
    source, library = phantom.folder / "beside.c", phantom.folder / "beside.so"
    source.write_text(BESIDE)
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    # PyDLL: this thread keeps the interpreter's lock while it waits for the other.
    run(phantom, door, BESIDE=library, code="""
tensor(4 * MIB)
beside = ctypes.PyDLL(os.environ["BESIDE"])
beside.allocate_beside.restype = ctypes.c_void_p
beside.allocate_beside.argtypes = [ctypes.c_void_p]
allocate = ctypes.cast(ctypes.CDLL(os.environ["GRUYERE_LIBRARY"]).gruyere_malloc, ctypes.c_void_p)
address = beside.allocate_beside(allocate)
(line,) = [line for line in sites.read() if line.get("address") == address]
assert line["site"] == "none", line
""")


def test_a_thread_gets_its_own_frames(phantom, door):
    run(phantom, door, code="""
def work(number):
    def inner():
        return tensor(4 * MIB)
    barrier.wait()
    for _ in range(50):
        block = inner()
    made[number] = block
barrier = threading.Barrier(4)
made = {}
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for block in made.values():
    names = [frame[1].split(".")[-1] for frame in sites.of(block)["frames"]]
    assert names[:3] == ["tensor", "inner", "work"] and "<module>" not in names, names
""")


def test_many_stacks_keep_the_table_bounded_and_the_program_going(phantom, door):
    run(phantom, door, code="""
blocks = []
for number in range(20_000):
    scope = {"tensor": tensor}
    exec(compile(f"def f{number}(): return tensor({2 * MIB})", f"<made {number}>", "exec"), scope)
    block = scope[f"f{number}"]()
    if number in (0, 5_000):
        blocks.append(block)
assert [sites.of(block)["frames"][1][:2] for block in blocks] == [
    [f"<made {number}>", f"f{number}"] for number in (0, 5_000)]
assert sites.of(block) == "other", sites.of(block)
(table,) = [line for line in sites.read() if line["kind"] == "table"]
assert 15_000 < table["sites"] < 16_384, table
# What is known stays known.
lines = {line["address"]: line["site"] for line in sites.read() if line["kind"] == "block"}
assert {lines[block.data_ptr()]["frames"][1][1] for block in blocks} == {"f0", "f5000"}
""")


def test_a_code_object_at_the_address_of_one_that_is_gone_is_not_mistaken_for_it(phantom, door):
    run(phantom, door, code="""
seen = set()
reused = 0
for number in range(300):
    scope = {"tensor": tensor}
    exec(compile(f"def f{number}(): return tensor({2 * MIB})", "<made>", "exec"), scope)
    code = id(scope[f"f{number}"].__code__)
    reused += code in seen
    seen.add(code)
    block = scope[f"f{number}"]()
    if number % 30 == 29:
        assert sites.of(block)["frames"][1][1] == f"f{number}"
    del scope
assert reused > 0
""")


def test_names_that_are_not_ascii_and_very_deep_stacks_are_told(phantom, door):
    run(phantom, door, code="""
def größe():
    return tensor(4 * MIB)
assert sites.of(größe())["frames"][1][1] == "größe"
def 深(depth):
    return 深(depth - 1) if depth else tensor(4 * MIB)
frames = sites.of(深(900))["frames"]
assert len(frames) == 24 and frames[1][1] == frames[23][1] == "深", frames
""")


def test_the_line_is_kept_that_called_a_library_which_calls_itself_deeper_than_is_kept(phantom, door):
    run(phantom, door, code="""
from copy import deepcopy
def deep(levels):
    return torch.nn.Sequential(deep(levels - 1) if levels else torch.nn.Linear(1024, 1024))
def moved():
    return deep(15).to("cuda")
def copied():
    return deepcopy(model)
model = moved()
for made, name in [(model, "moved"), (copied(), "copied")]:
    frames = sites.of(next(made.parameters()))["frames"]
    own = [frame[1] for frame in frames if frame[0] == moved.__code__.co_filename]
    assert own == [name, "<module>"] and len(frames) == 24, frames
    # The innermost are there as well.
    assert frames[0][0].endswith("/torch/nn/modules/module.py" if name == "moved" else
                                 "/torch/nn/parameter.py"), frames
""")


def test_forked_children_and_the_end_of_the_interpreter_are_quiet(phantom, door):
    ran = run(phantom, door, code="""
block = tensor(4 * MIB)
child = os.fork()
if child == 0:
    # A child may make modules: their names are told to nobody.
    torch.nn.Sequential(torch.nn.Linear(2, 2))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
# Not through torch, whose own calls abort on a thread that the interpreter ends.
library = ctypes.CDLL(os.environ["GRUYERE_LIBRARY"])
library.gruyere_malloc.restype = ctypes.c_void_p
def forever():
    while True:
        block = library.gruyere_malloc(ctypes.c_ssize_t(4 * MIB), 0, None)
        library.gruyere_free(ctypes.c_void_p(block), ctypes.c_ssize_t(0), 0, None)
for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
class Late:
    def __del__(self):
        late = tensor(4 * MIB)
keep = Late()
circle = [Late()]
circle.append(circle)
atexit.register(lambda: tensor(8 * MIB))
time.sleep(0.2)
""")
    assert "Traceback" not in ran.err, ran.err


def test_finalizers_that_free_and_allocate_meet_no_lock(phantom, door):
    run(phantom, door, code="""
class Freer:
    def __init__(self):
        self.block = tensor(4 * MIB)
        self.circle = self
    def __del__(self):
        self.block = None
        tensor(4 * MIB)
gc.set_threshold(1)
for number in range(300):
    Freer()
    tensor(4 * MIB + 512 * number)
""")
