"""The stand-in GPU as programs that train see it: which GPU it looks like, what its libraries
answer, what the host reads, and how little of the host's memory it takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import (
    GRUYERE,
    LIBRARIES,
    LIBRARIES_PRELOADED,
    OWNER,
    PHANTOM,
    ROOT,
    clean_environment,
)
from gruyere import GruyereError, _stand_in

CONVOLUTIONS = """
import sys, torch
from torch import nn
torch.backends.cudnn.benchmark = sys.argv[1] == "benchmark"
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 16, 3, stride=2, groups=4), nn.ConvTranspose2d(16, 8, 2, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for layout in (torch.contiguous_format, torch.channels_last):
    model = model.to(memory_format=layout)
    x = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=layout)
    with torch.autocast("cuda", torch.bfloat16, enabled=layout is torch.channels_last):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
print("{}")
"""
# Two convolutions and a transposed one, whose passes are those of the other direction.
CONVOLUTION_CALLS = {
    "cudnnConvolutionForward": 6,
    "cudnnConvolutionBackwardData": 6,
    "cudnnConvolutionBackwardFilter": 6,
}


def test_convolutions_train_and_their_workspaces_are_counted_as_unknown(phantom):
    books = phantom.run(None, "as it is", code=CONVOLUTIONS).check().books
    found = books["unknown_workspaces"]
    assert found.keys() >= CONVOLUTION_CALLS.keys() | {"cudnnBatchNormalizationForwardTrainingEx"}
    # The first convolution's input needs no gradient, which is one call less in either layout.
    assert found["cudnnConvolutionForward"] == 2 * 3
    assert found["cudnnConvolutionBackwardFilter"] == 2 * 3
    assert found["cudnnConvolutionBackwardData"] == 2 * 2
    # Every algorithm is tried, some more than once.
    tried = phantom.run(None, "benchmark", code=CONVOLUTIONS).check().books["unknown_workspaces"]
    assert tried["cudnnConvolutionForward"] > found["cudnnConvolutionForward"]


RECURRENT = """
import torch
from torch import nn
for network in (
    nn.LSTM(64, 128, 2, bidirectional=True, dropout=0.1),
    nn.LSTM(64, 128, proj_size=32),
    nn.GRU(64, 128, 3, bias=False, batch_first=True),
    nn.RNN(64, 128),
):
    network.cuda().flatten_parameters()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    lengths = torch.tensor([9, 7, 5])
    x = torch.randn(3, 9, 64, device="cuda", requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    packed = packed if network.batch_first is False else x
    out, _ = network(packed)
    (out if torch.is_tensor(out) else out.data).sum().backward()
    optimizer.step()
print("{}")
"""


def test_recurrent_networks_train(phantom):
    found = phantom.run(None, code=RECURRENT).check().books["unknown_workspaces"]
    assert (found["cudnnRNNForward"], found["cudnnRNNBackwardData_v8"]) == (4, 4)


def test_the_stand_in_has_the_cudnn_that_torch_was_built_with(phantom, monkeypatch):
    code = "import torch; print(torch.backends.cudnn.version(), '{}')"
    found = phantom.run(None, code=code, PHANTOM_CUDNN="9.99.1").check()
    assert found.out.startswith("99901 "), found.out
    wanted = ["filelock", 'nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    assert _stand_in._cudnn_version() == {"PHANTOM_CUDNN": "9.26.0"}
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    assert _stand_in._cudnn_version() == {}


LINEAR_ALGEBRA = """
import torch
from torch import linalg
for shape in ((48, 48), (6, 48, 48), (600, 600)):
    a = torch.randn(shape, device="cuda", requires_grad=True)
    b, tall = torch.randn(*shape[:-1], 8, device="cuda"), a[..., :8]
    found = [
        linalg.cholesky(a), *linalg.eigh(a), *linalg.svd(a), *linalg.qr(tall), linalg.inv(a),
        linalg.solve(a, b), *linalg.slogdet(a), *linalg.lu_factor(a)[:1], linalg.pinv(tall),
        linalg.solve_triangular(a, b, upper=True), torch.cholesky_solve(b, a),
        linalg.lstsq(tall, b).solution, *torch.svd_lowrank(a, 6),
    ]
    found += [linalg.svdvals(a, driver=driver) for driver in ("gesvd", "gesvdj", "gesvda")]
    sum(part.sum() for part in found).backward()
    assert a.grad.shape == a.shape
    linalg.eigvals(a.detach().to(torch.complex64)), linalg.ldl_factor(a.detach())
layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(64, 32).cuda())
torch.nn.init.orthogonal_(torch.empty(64, 32, device="cuda"))
layer(torch.randn(4, 64, device="cuda")).sum().backward()
print("{}")
"""


def test_matrices_are_factored_and_their_workspaces_are_counted_as_unknown(phantom):
    books = phantom.run(
        None, code=LINEAR_ALGEBRA, PHANTOM_VALUES="zeros", USE_PYTORCH_KERNEL_CACHE=0
    ).check().books
    calls = {"cusolverDnXpotrf", "cusolverDnSgetrf", "cusolverDnSormqr", "cusolverDnSgesvd"}
    assert books["unknown_workspaces"].keys() >= calls


FOURIER = """
import torch
x = torch.randn(4, 64, device="cuda", requires_grad=True)
for _ in range(3):
    # Two lengths there, and one back.
    short, long = torch.fft.rfft(x), torch.fft.rfft(x, n=128)
    torch.fft.irfft(long * long.conj(), n=128).sum().backward()
torch.fft.ifft2(torch.fft.fft2(x.to(torch.complex64))).real.sum().backward()
torch.stft(x.detach(), 16, window=torch.ones(16, device="cuda"), return_complex=True)
print("{}")
"""


def test_transforms_run_and_each_plan_is_counted_as_unknown(phantom):
    books = phantom.run(None, code=FOURIER).check().books
    # In the loop three, and back through two of them; an inverse of two dimensions with its
    # gradient; windows.
    assert books["calls"]["cufftXtExec"] == 3 * (3 + 2) + 4 + 1
    # A plan is made once for each shape, kind and length.
    assert books["unknown_workspaces"]["cufftXtMakePlanMany"] == 3 + 2 + 1 + 1


SPARSE = """
import torch
weights = torch.randn(64, 8, device="cuda", requires_grad=True)
csr = torch.eye(64).to_sparse_csr().cuda()
coo = torch.eye(64).to_sparse().coalesce().cuda()
for matrix in (csr, coo):
    torch.sparse.mm(matrix, weights).sum().backward()
csr @ weights[:, 0]
torch.eye(64).to_sparse_bsr((16, 16)).cuda() @ weights.detach()
torch.sparse.sampled_addmm(csr, weights @ weights.t(), torch.eye(64, device="cuda"))
torch.triangular_solve(weights, csr)
print("{}")
"""


def test_a_sparse_matrix_multiplies_a_dense_one(phantom):
    books = phantom.run(None, code=SPARSE, PHANTOM_VALUES="zeros").check().books
    calls = {"cusparseSpMM", "cusparseSpMV", "cusparseSDDMM", "cusparseSpSM"}
    assert books["unknown_workspaces"].keys() >= calls


ATTENTION = """
import json, torch
from torch.nn.functional import scaled_dot_product_attention
q, k, v = (
    torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.half, requires_grad=True) for _ in range(3)
)
out = scaled_dot_product_attention(q, k, v, is_causal=True)
out.sum().backward()
properties = torch.cuda.get_device_properties(0)
print(json.dumps({
    "kernel": out.grad_fn.name(),
    "name": properties.name,
    "capability": torch.cuda.get_device_capability(),
    "multiprocessors": properties.multi_processor_count,
    "memory": properties.total_memory,
    "shared": properties.shared_memory_per_block_optin,
}))
"""


@pytest.mark.parametrize(
    "capability, shared, kernel",
    [
        ("9.0", 227, "ScaledDotProductCudnnAttentionBackward0"),
        ("8.9", 99, "ScaledDotProductFlashAttentionBackward0"),
        ("7.5", 64, "ScaledDotProductEfficientAttentionBackward0"),
    ],
)
def test_torch_sees_the_gpu_that_was_asked_for_and_chooses_its_attention(
    phantom, capability, shared, kernel
):
    looks = {
        "PHANTOM_NAME": "Some GPU",
        "PHANTOM_CAPABILITY": capability,
        "PHANTOM_MULTIPROCESSORS": 42,
        "PHANTOM_MEMORY": "24GiB",
    }
    ran = phantom.run(None, code=ATTENTION, **looks).check()
    assert ran.report == {
        "kernel": kernel,
        "name": "Some GPU (stand-in)",
        "capability": [int(part) for part in capability.split(".")],
        "multiprocessors": 42,
        "memory": 24 << 30,
        "shared": shared << 10,
    }


SCANS = """
import torch
x = torch.arange(512, device="cuda")
x.cumsum(0), x.sort(), x.unique(), (x != 1).nonzero()
"""


# An RTX 4090 runs what was compiled for 8.6; for a V100 this torch has nothing.
@pytest.mark.parametrize("capability", ["8.9", "7.0"])
def test_kernels_that_choose_by_generation_run_where_torch_has_none_of_it(phantom, capability):
    phantom.run(None, code=SCANS, PHANTOM_CAPABILITY=capability).check()


RANKS = """
import json, sys, torch
import torch.distributed as dist
ranks = int(sys.argv[1])
store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=ranks)
if ranks > 1:
    store.set("0", b"")
here = torch.arange(4).cuda()
dist.all_reduce(here)
gathered, scattered = [torch.empty_like(here)], torch.empty_like(here)
dist.all_gather(gathered, here)
dist.reduce_scatter_tensor(scattered, here)
# In a group: a message to oneself, of which the second half is told of first.
twice = [torch.empty_like(here) for _ in range(2)]
for message in (
    [dist.P2POp(dist.isend, here, 0), dist.P2POp(dist.irecv, twice[0], 0)],
    [dist.P2POp(dist.irecv, twice[1], 0), dist.P2POp(dist.isend, here + 0, 0)],
):
    for work in dist.batch_isend_irecv(message):
        work.wait()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# Its size is of one rank's, and no kernel has to find it.
objects = [{"rank": 0}]
dist.broadcast_object_list(objects)
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"all": [gathered[0].tolist(), scattered.tolist(), objects, twice[0].tolist()]}))
"""


def test_nccl_on_one_rank_hands_on_what_was_sent(phantom):
    ran = phantom.run(None, 1, code=RANKS).check()
    assert ran.report["all"] == [[0, 1, 2, 3], [0, 1, 2, 3], [{"rank": 0}], [0, 1, 2, 3]]
    assert ran.books["unknown_workspaces"]["ncclCommInitRankConfig"] == 1


def test_nccl_on_more_ranks_is_refused_with_what_to_do(phantom):
    ran = phantom.run(None, 2, code=RANKS, TORCH_NCCL_ASYNC_ERROR_HANDLING=0)
    assert ran.code != 0
    (said,) = {line for line in ran.err.splitlines() if "NCCL for one rank only" in line}
    assert said.startswith("the stand-in GPU ") and "asks for 2" in said, ran.err
    assert 'init_process_group("gloo")' in said and "WORLD_SIZE=1" in said, ran.err
    assert "phantom" not in ran.err, ran.err


# What is written by kernels, fills, copies and optimizers, 62 GiB at the peak; and what of it is
# the host's.
CHEAP = """
import json, torch
from torch import nn
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10
torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1, device="cuda"))])
optimizer.param_groups[0]["params"][0].grad = torch.zeros(1, device="cuda")
optimizer.step()
before = resident()
GIB = 1 << 30
def memory(gib):
    return torch.empty(gib * GIB // 4, device="cuda")
tensors = [memory(4) for _ in range(3)]
for tensor in tensors:
    tensor.fill_(1).normal_().zero_().uniform_().add_(1)
torch._foreach_add_(tensors, [torch.zeros_like(tensor) for tensor in tensors])
parameters = [nn.Parameter(tensor) for tensor in tensors]
for parameter in parameters:
    parameter.grad = torch.zeros_like(parameter)
torch.optim.AdamW(parameters, foreach=True).step()
optimizer = torch.optim.AdamW(parameters, fused=True)
optimizer.step()
# A checkpoint that is loaded, and one that is taken: fresh memory of the host's, which nobody has
# touched.
with torch.device("meta"):
    model = nn.Linear(1 << 15, 1 << 15)
model.to_empty(device="cuda")
model.load_state_dict({name: torch.empty(part.shape) for name, part in model.state_dict().items()})
taken = {name: part.cpu() for name, part in model.state_dict().items()}
pinned = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
pinned.copy_(tensors[0].view(torch.uint8), non_blocking=True)
tensors[1].view(torch.uint8).copy_(pinned, non_blocking=True)
print(json.dumps({
    "device": torch.cuda.max_memory_allocated(), "host": resident() - before
}))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("values", [None, "zeros", "random:1"])
def test_memory_that_nobody_touches_takes_none_of_the_hosts(phantom, values):
    settings = {"PHANTOM_VALUES": values} if values else {}
    ran = phantom.run(None, code=CHEAP, **settings).check()
    assert ran.report["device"] > 60 << 30
    assert ran.report["host"] < 300 << 20


READS = """
import json, torch
loss = torch.randn(5, device="cuda").sum()
ids = torch.tensor([5, 7, 9]).cuda()
print(json.dumps({
    "loss": loss.item(), "again": loss.item(), "ids": ids.tolist(),
    "most": (ids + 1).tolist(), "found": bool((ids > 6).any()),
}))
"""


@pytest.mark.thorough
def test_what_a_kernel_would_have_written_reads_as_asked_and_what_was_copied_in_as_it_was(phantom):
    zeros = phantom.run(None, code=READS, PHANTOM_VALUES="zeros").check()
    assert zeros.report == {
        "loss": 0.0, "again": 0.0, "ids": [5, 7, 9], "most": [0, 0, 0], "found": False
    }  # fmt: skip
    # Two of the loss, one of each of the others.
    assert zeros.books["host_reads"] == {"count": 5, "bytes": 4 + 4 + 24 + 24 + 1}
    seeds = [phantom.run(None, code=READS, PHANTOM_VALUES=f"random:{n}").check() for n in range(4)]
    for ran in seeds:
        assert 0 < ran.report["loss"] < 1e-40 and ran.report["loss"] == ran.report["again"]
        assert ran.report["ids"] == [5, 7, 9]
        assert all(1 <= number <= 7 for number in ran.report["most"])
    assert len({tuple(ran.report["most"]) for ran in seeds}) > 1
    again = phantom.run(None, code=READS, PHANTOM_VALUES="random:0").check()
    assert again.report == seeds[0].report


# What torch asks NVML: for its error, and where segments expand (newer than 2.11) for the fabric.
ASKS_NVML = """
import os
import torch
before = torch.cuda.device_count(), torch.cuda._raw_device_uuid_nvml()
if not os.fork():
    assert torch.zeros(1, device="cuda").is_cuda
    os._exit(0)
assert os.wait()[1] == 0
block = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
assert before == (1, [f"GPU-{torch.cuda.get_device_properties(0).uuid}"])
try:
    torch.empty(1 << 40, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    assert "non-PyTorch memory, this process has 20.00 MiB memory in use" in str(error), error
print("{}")
"""


def test_torch_is_told_by_nvml_what_the_driver_and_the_books_say(phantom):
    phantom.run(None, code=ASKS_NVML, allocator="expandable").check()


def test_a_torch_that_cannot_use_it_is_named_with_what_is_needed(tmp_path, monkeypatch):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(GruyereError, match=r"torch 2\.11\.0\+cpu in .* is not built for CUDA"):
        _stand_in.check_torch()
    with pytest.raises(GruyereError, match="needs Linux, and this is darwin"):
        _stand_in.check_torch("darwin")
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    _stand_in.check_torch()


def test_the_folder_of_links_is_the_users_and_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = _stand_in.links(PHANTOM)
    assert folder.parent == tmp_path / "cache" / "gruyere"
    assert sorted(os.listdir(folder)) == sorted(_stand_in.NAMES)
    assert all((folder / name).resolve() == PHANTOM.resolve() for name in _stand_in.NAMES)
    made = folder.stat().st_mtime_ns
    assert _stand_in.links(PHANTOM) == folder and folder.stat().st_mtime_ns == made
    assert list(folder.parent.iterdir()) == [folder], "no half is left"
    # Another library has another folder, and a home that cannot be written to is no reason to fail.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert _stand_in.links(Path("/elsewhere.so")).parent == tmp_path


def test_a_program_runs_with_what_the_package_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GRUYERE_PHANTOM", str(PHANTOM))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    said = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.zeros(4, device='cuda').device)"],
        env={**os.environ, **_stand_in.environment(OWNER)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert said.stdout == "cuda:0\n"


@pytest.mark.parametrize("is_dry_run", [False, True], ids=["by hand", "in a dry run"])
def test_the_library_and_its_package_say_that_the_gpu_is_a_stand_in(tmp_path, is_dry_run):
    """But for the package in a dry run, whose own answers say it."""
    code = """
import gruyere, torch
gruyere.enable(door="pluggable")
torch.zeros(4, device="cuda")
"""
    settings = {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    settings |= {"LD_PRELOAD": LIBRARIES_PRELOADED, "LD_LIBRARY_PATH": LIBRARIES}
    settings |= {"GRUYERE_LOG": "info", "PHANTOM_DRYRUN": int(is_dry_run)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment() | {key: str(value) for key, value in settings.items()},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count(", ON THE STAND-IN GPU, ") == 1, ran.stderr
    warning = "GruyereWarning: this process runs on the stand-in GPU"
    assert ran.stderr.count(warning) == 1 - is_dry_run, ran.stderr
    assert ran.stderr.count("gruyere: stand-in GPU (PID ") == 1 - is_dry_run, ran.stderr
