"""The Python package: what cannot work in direct mode is said, once, with what to use instead."""

import pytest

from conftest import ROOT
from package import PRELUDE, report


def test_the_table_in_the_docs_has_everything_that_is_warned_of_or_refused():
    text = (
        (ROOT / "docs" / "pytorch.md")
        .read_text()
        .split("## What cannot work in direct mode")[1]
        .split("## ")[0]
    )
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    limits = (ROOT / "python_loader" / "gruyere" / "_limits.py").read_text()
    told = {
        "CUDNN": "cudnn.benchmark", "REDUCE_OVERHEAD": "reduce-overhead",
        "GRAPH_TREES": "triton.cudagraphs", "IPC": "storage IPC",
        "MEM_POOL": "torch.cuda.MemPool", "NCCL": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    }  # fmt: skip
    texts = {
        line.split(" = ")[0] for line in limits.splitlines() if line[:1].isupper() and " = " in line
    }
    assert texts == set(told), "a text that no row of the table is known for"
    for what in told.values():
        (row,) = [row for row in rows if what in row.split("|")[1]]
        assert "behind mode" in row or "as above" in row, row


@pytest.mark.parametrize("early", [False, True])
def test_cudnn_benchmark_stays_off_and_says_so_once(installed, early):
    asks = "torch.backends.cudnn.benchmark = True\n"
    code = f"""{PRELUDE}
{asks if early else ''}gruyere.enable()
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
    assert "program.py:" in line and "cudnn.benchmark" in line and "behind" in line


@pytest.mark.parametrize("asked", ["mode='reduce-overhead'", "options={'triton.cudagraphs': True}"])
def test_compiling_for_graph_trees_goes_on_without_them_and_says_so_once(installed, asked):
    code = f"""{PRELUDE}
gruyere.enable()
asked = {{"mode": None, "options": None, **dict({asked})}}
wrapped = [torch._TorchCompileInductorWrapper(dynamic=None, **asked) for _ in range(2)]
torch.compile(lambda x: x + 1, {asked})
""" + report(graphs="[w.config.get('triton.cudagraphs') for w in wrapped]")
    ran = installed.code(code)
    assert ran.report == {"graphs": [False, False]}
    (line,) = ran.warnings()
    assert "CUDA graphs" in line and "behind" in line


def test_graph_trees_by_another_way_are_refused_with_a_remedy(installed):
    code = f"""{PRELUDE}
gruyere.enable()
from torch._inductor import cudagraph_trees
try:
    cudagraph_trees.CUDAGraphTreeManager(0)
except gruyere.GruyereError as error:
    said = str(error)
""" + report(said="said")
    said = installed.code(code).report["said"]
    assert "triton.cudagraphs" in said and "behind" in said


def test_sharing_tensors_and_pools_of_torch_name_what_to_use_instead(installed):
    code = f"""{PRELUDE}
gruyere.enable()
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
    assert "cpu()" in share and "behind" in share
    assert all("gruyere.pool" in said for said in pool) and len(pool) == int(ran.report["pools"])
    assert ran.report["hook"] == "0"
    (line,) = ran.warnings()
    assert "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK" in line
