"""The Python package: what cannot work is said, once, with what to use instead."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from conftest import GRUYERE, ROOT
from package import PRELUDE, report


def test_the_table_in_the_docs_has_everything_that_is_warned_of_or_refused():
    text = (
        (ROOT / "docs" / "pytorch.md")
        .read_text()
        .split("## What cannot work through the pluggable door")[1]
        .split("## ")[0]
    )
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    limits = (ROOT / "python_loader" / "gruyere" / "_torch" / "unsupported.py").read_text()
    told = {
        "CUDNN": "cudnn.benchmark", "REDUCE_OVERHEAD": "reduce-overhead",
        "GRAPH_TREES": "triton.cudagraphs", "IPC": "storage IPC",
        "MEM_POOL": "torch.cuda.MemPool", "NCCL": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "GROUPS": "torch.distributed` with NCCL",
    }  # fmt: skip
    texts = {
        line.split(" = ")[0] for line in limits.splitlines() if line[:1].isupper() and " = " in line
    }
    assert texts == set(told), "a text that no row of the table is known for"
    for what in told.values():
        (row,) = [row for row in rows if what in row.split("|")[1]]
        _, _, _, remedy, forced, _ = row.split("|")
        assert "`door:native`" in remedy or "as above" in remedy, row
        assert LINE.search(forced) or "as above" in forced, row


# Where torch says that it raised an exception, and FILE:LINE as the table gives them.
RAISED = re.compile(r"Exception raised from \w+ at /\S*?pytorch/((?:torch|c10)/\S+):(\d+)")
LINE = re.compile(r"`((?:torch|c10)/[\w/]+\.(?:py|h|cpp)):(\d+)`")


@pytest.mark.skipif(
    not importlib.metadata.version("torch").startswith("2.15.0"),
    reason="the lines are those of torch 2.15.0",
)
def test_the_lines_of_torchs_that_the_table_names_are_those_that_refuse(installed):
    text = (ROOT / "docs" / "pytorch.md").read_text()
    lines = {(file, int(line)) for file, line in LINE.findall(text)}
    folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    for file, line in lines:
        if file.endswith(".cpp"):
            continue
        lies = folder.parent / file if file.endswith(".py") else folder / "include" / file
        words = {
            "torch/_inductor/cudagraph_trees.py": "_cuda_getCheckpointState",
            "torch/multiprocessing/reductions.py": "_share_cuda_",
            "c10/cuda/CUDACachingAllocator.h": "createOrIncrefPool",
        }[file]
        assert words in "".join(lies.read_text().splitlines()[line - 1 : line + 4]), (file, line)
    # Those of C++ torch itself tells with its errors.
    code = PRELUDE + """
allocator = torch.cuda.memory.CUDAPluggableAllocator(
    os.environ["LIBRARY"], "gruyere_malloc", "gruyere_free"
)
torch.cuda.memory.change_current_allocator(allocator)
kept = tensor(1)
said = []
for ask in (
    lambda: kept.untyped_storage()._share_cuda_(),
    lambda: torch._C._cuda_getCheckpointState(0, (0, 1)),
    torch.cuda.MemPool,
):
    try:
        ask()
    except RuntimeError as error:
        said.append(str(error))
""" + report(said="said")
    ran = installed.code(
        code, TORCH_SHOW_CPP_STACKTRACES="1", TORCH_DISABLE_ADDR2LINE="1", LIBRARY=GRUYERE
    )
    told = set()
    for said in ran.report["said"]:
        file, line = RAISED.search(said).groups()
        told.add((file, int(line)))
    assert len(told) == 3 and told <= lines, told - lines


@pytest.mark.parametrize("early", [False, True])
def test_cudnn_benchmark_stays_off_and_says_so_once(installed, early):
    asks = "torch.backends.cudnn.benchmark = True\n"
    code = f"""{PRELUDE}
{asks if early else ''}gruyere.enable(door="pluggable")
{asks}{asks}
with torch.backends.cudnn.flags(enabled=False, benchmark=True):
    inside = torch.backends.cudnn.benchmark
torch.backends.cudnn.benchmark = False
""" + report(
        inside="inside",
        after="torch.backends.cudnn.benchmark",
        read="torch._C._get_cudnn_benchmark()",
    )
    ran = installed.code(code)
    assert ran.report == {"inside": False, "after": False, "read": False}
    (line,) = ran.warnings()
    assert "program.py:" in line and "cudnn.benchmark" in line and "door:native" in line


@pytest.mark.parametrize("asked", ["mode='reduce-overhead'", "options={'triton.cudagraphs': True}"])
def test_compiling_for_graph_trees_goes_on_without_them_and_says_so_once(installed, asked):
    code = f"""{PRELUDE}
gruyere.enable(door="pluggable")
asked = {{"mode": None, "options": None, **dict({asked})}}
wrapped = [torch._TorchCompileInductorWrapper(dynamic=None, **asked) for _ in range(2)]
torch.compile(lambda x: x + 1, {asked})
""" + report(graphs="[w.config.get('triton.cudagraphs') for w in wrapped]")
    ran = installed.code(code)
    assert ran.report == {"graphs": [False, False]}
    (line,) = ran.warnings()
    assert "CUDA graphs" in line and "door:native" in line


def test_graph_trees_by_another_way_are_refused_with_a_remedy(installed):
    code = f"""{PRELUDE}
gruyere.enable(door="pluggable")
from torch._inductor import cudagraph_trees
try:
    cudagraph_trees.CUDAGraphTreeManager(0)
except gruyere.GruyereError as error:
    said = str(error)
""" + report(said="said")
    said = installed.code(code).report["said"]
    assert "triton.cudagraphs" in said and "door:native" in said


def test_what_the_refusal_of_the_cudagraphs_backend_names_works(installed):
    code = f"""{PRELUDE}
gruyere.enable(door="pluggable")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).cuda()
x = torch.ones(4, 8, device="cuda")
try:
    torch.compile(model, backend="cudagraphs")(x)
    said = None
except gruyere.GruyereError as error:
    said = str(error)
# Followed: the backend left out, the graphs made by hand.
graph, static = torch.cuda.CUDAGraph(), x.clone()
with torch.no_grad(), torch.cuda.graph(graph):
    out = model(static)
for _ in range(3):
    graph.replay()
graphed = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
for _ in range(3):
    graphed(x.clone().requires_grad_()).sum().backward()
""" + report(said="said", shape="list(out.shape)", held="gruyere.stats().captured")
    ran = installed.code(code).report
    for word in ("'cudagraphs'", "make_graphed_callables", "torch.cuda.graph", "door:native"):
        assert word in ran["said"]
    assert ran["shape"] == [4, 8] and ran["held"] > 0


def test_what_the_refusal_to_send_a_tensor_to_another_process_names_works(installed):
    code = PRELUDE + """
import torch.multiprocessing as mp
def work(queue, done):
    got = queue.get()
    done.put([tuple(got.shape), str(got.cuda().device)])
if __name__ == "__main__":
    gruyere.enable(door="pluggable")
    context = mp.get_context("spawn")
    queue, done = context.SimpleQueue(), context.SimpleQueue()
    kept = tensor(1)
    try:
        queue.put(kept)
        said = None
    except RuntimeError as error:
        said = str(error)
    worker = context.Process(target=work, args=(queue, done))
    worker.start()
    queue.put(kept.cpu())
    got = done.get()
    worker.join()
""" + report(said="said", got="got", code="worker.exitcode").replace("\nprint", "\n    print")
    ran = installed.code(code).report
    assert "tensor.cpu()" in ran["said"] and "torch.distributed" in ran["said"]
    assert (ran["got"], ran["code"]) == ([[1 << 20], "cuda:0"], 0)


def test_sharing_tensors_and_pools_of_torch_name_what_to_use_instead(installed):
    code = f"""{PRELUDE}
gruyere.enable(door="pluggable")
said = []
attempts = [lambda: tensor(1).untyped_storage()._share_cuda_()]
# torch 2.4 has no such pools.
attempts += [torch.cuda.MemPool] if hasattr(torch.cuda, "MemPool") else []
for attempt in attempts:
    try:
        attempt()
    except gruyere.GruyereError as error:
        said.append(str(error))
""" + report(
        said="said",
        pools="hasattr(torch.cuda, 'MemPool')",
        hook="os.environ['TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK']",
    )
    ran = installed.code(code, TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")
    share, *pool = ran.report["said"]
    assert "cpu()" in share and "torch.distributed" in share and "door:native" in share
    assert all("gruyere.pool" in said and "door:native" in said for said in pool)
    assert len(pool) == int(ran.report["pools"])
    assert ran.report["hook"] == "0"
    (line,) = ran.warnings()
    assert "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK" in line
