"""What a dry run answers for the device where a check, a mask or a number decides how the program
goes on."""

import json

import pytest

from conftest import ROOT
from dry_runs import dryrun, told
from gruyere._dryrun import answers, computed, finite, masks

BEGIN = """
import math, sys
import torch, torch.nn as nn, torch.nn.functional as F

model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""

# Each way in which programs ask whether a number is one.
CHECKS = (
    BEGIN
    + """
torch.autograd.set_detect_anomaly(True)
for step in range(4):
    x = torch.randn(64, 512, device="cuda")
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if torch.isnan(loss):
        continue
    if not torch.isfinite(loss):
        sys.exit(1)
    assert not torch.isnan(model(x)).any(), "NaN"
    if loss.isnan().item() or loss.isnan().cpu().item() or loss != loss:
        break
    if (torch.isnan(loss) | torch.isinf(loss)).any() or torch.isnan(x).sum() > 0:
        continue
    if not all(torch.isfinite(p.grad).all() for p in model.parameters()):
        continue
    if torch.stack([p.grad.isnan().any() for p in model.parameters()]).any():
        continue
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if not torch.isfinite(norm) or norm == math.inf or norm == float("inf"):
        continue
    x[~torch.isnan(x)].sum()
    opt.step()
"""
)


def test_a_check_for_nan_or_infinity_is_answered_as_in_a_training_that_goes_well(tmp_path):
    (tmp_path / "train.py").write_text(CHECKS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["trust"]["reasons"] == []
    assert document["program"]["steps"] == 3
    assert document["trust"]["answered"].keys() == {finite.FINITE}


# torch's encoder compares its mask with a causal one, and takes another path if they are equal.
ENCODER = """
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(64, 2, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2).cuda()
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
for _ in range(4):
    mask = MASK
    encoder(torch.zeros(4, 32, 64, device="cuda"), mask=mask).sum().backward()
    opt.step()
"""
SQUARE = "nn.Transformer.generate_square_subsequent_mask(32"
LOCAL = "torch.zeros(32, 32).masked_fill(torch.eye(32) > 0, float('-inf')).cuda()"


@pytest.mark.parametrize(
    ("mask", "is_answered"),
    [
        (f"{SQUARE}, device='cuda')", False),
        (f"{SQUARE}, device='cuda') + torch.empty(32, 32, device='cuda')", True),
        (f"{SQUARE}).cuda()", False),
        (LOCAL, False),
    ],
)
def test_a_mask_that_a_kernel_made_is_causal_and_one_that_is_known_is_looked_at(
    tmp_path, mask, is_answered
):
    (tmp_path / "train.py").write_text(ENCODER.replace("MASK", mask))
    trust = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))["trust"]
    assert trust["reasons"] == []
    assert (answers.CAUSAL in trust["answered"]) == is_answered


# What the host has copied is known, and what is computed from it alone; not once a kernel has
# written to it.
COPIED = """
import torch

model = torch.nn.Linear(64, 64).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
ones, ids = torch.ones(4, 16, dtype=torch.long), torch.randint(3, 9, (4, 16))
padded = ones.clone()
padded[0, 0] = 0
ones, ids, padded, made = ones.cuda(), ids.cuda(), padded.cuda(), torch.ones_like(ids.cuda())
WRITTEN
for _ in range(4):
    if not (ones == 1).all() or not made.bool().all() or (padded == 1).all():
        torch.empty(1 << 26, device="cuda")
    if (ids < 3).any() or ids.max().item() >= 9 or (ids == 2).sum() > 0 or not ids.min():
        torch.empty(1 << 26, device="cuda")
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    opt.step()
"""


def test_conditions_on_what_the_host_has_copied_are_computed(tmp_path):
    (tmp_path / "train.py").write_text(COPIED.replace("WRITTEN", ""))
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["trust"]["answered"].keys() == {computed.KNOWN}
    # Nothing of 256 MiB.
    assert document["peak"]["bytes"] < 128 << 20


@pytest.mark.thorough
def test_what_a_kernel_may_have_written_is_not_known(tmp_path):
    written = "ones[0, 0] = torch.empty((), device='cuda')"
    (tmp_path / "train.py").write_text(COPIED.replace("WRITTEN", written))
    ran = dryrun(tmp_path, "--alloc", "torch", "--json", "train.py")
    document = json.loads(ran.stdout)
    assert document["trust"]["requests"] and document["peak"]["bytes"] > 256 << 20


# A masked loss, whose backward counts the mask again; the place of true values; an assignment.
MASKED = (
    BEGIN
    + """
for step in range(4):
    x, y = torch.randn(256, 512, device="cuda"), torch.randint(0, 512, (256,), device="cuda")
    opt.zero_grad()
    keep = y > 10
    loss = F.cross_entropy(model(x)[keep], y[keep])
    loss = loss + x.masked_select(x > 0).mean() + model(x)[torch.where(y > 5)[0]].mean()
    h = model(x).clone()
    h[keep] = x[keep] * 2
    (loss + h.sum()).backward()
    big = torch.empty(keep.nonzero().shape[0] << 20, dtype=torch.uint8, device="cuda")
    opt.step()
"""
)


@pytest.mark.parametrize("fits", [True, False])
def test_masks_select_every_element_and_what_does_not_fit_then_may_fit(tmp_path, fits):
    (tmp_path / "train.py").write_text(MASKED)
    gib = 1 if fits else 0.25
    ran = dryrun(tmp_path, "--gb", gib, "--context", "0MiB", "--alloc", "torch", "train.py")
    assert ran.returncode == (0 if fits else 4), ran.stdout + ran.stderr
    if fits:
        assert "It fits these 3 steps" in ran.stdout
        said = "Masks select every element in these runs: with fewer it needs less."
        assert said in " ".join(ran.stdout.split())
        assert "made the same" in ran.stdout and masks.SELECTED in " ".join(ran.stdout.split())
        assert "train.py:13" in ran.stdout, "the line that counts a mask is named"
    else:
        assert "Not trustworthy: masks select every element" in ran.stdout


SIZED = (
    BEGIN
    + """
for step in range(4):
    loss = model(torch.randn(64, 512, device="cuda")).sigmoid().mean()
    loss.backward()
    if {read} > 0.1:
        more = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    opt.step()
"""
)


@pytest.mark.parametrize("read", ["loss.item()", "loss.detach().bfloat16().cpu().float().numpy()"])
def test_a_program_that_compares_a_float_of_the_device_is_not_trusted(tmp_path, read):
    (tmp_path / "train.py").write_text(SIZED.format(read=read))
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    assert document["trust"]["difference"]["line"] == "train.py:12"


# cuBLAS's workspaces are as large with any batch.
SMALL = (
    BEGIN
    + """
for step in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    opt.step()
"""
)


def test_workspaces_do_not_grow_with_the_batch(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--gpu", "h100-80", "--json", "train.py"))
    assert document["peak"]["kinds"]["workspaces"] >= 32 << 20
    assert document["steps"]["growing_bytes"] < 8 << 20


# The functions that are answered serve compiled and scripted programs as before.
ELSEWHERE = """
import pickle
import torch
from gruyere._dryrun.answers import Answers

answers = Answers()
answers.watch()


def check(x):
    return torch.where(torch.isnan(x), 0.0, x).sum() + torch.isfinite(x).all()


x = torch.tensor([1.0, float("nan")])
assert torch.compile(check, backend="eager", fullgraph=True)(x) == 1
assert torch.jit.script(check)(x) == 1
assert torch.jit.trace(check, x)(x) == 1
assert pickle.loads(pickle.dumps(torch.isnan)) is torch.isnan
# On the host there is nothing to answer.
assert x.isnan().any().item() and not torch.isfinite(x).all() and x.nonzero().shape == (2, 1)
assert torch.vmap(lambda row: torch.isnan(row).any())(x[None]).item()

bad = torch.isnan(torch.ones(4, device="cuda"))
assert answers.finite.known.get(bad) is False
bad |= torch.ones(4, dtype=torch.bool, device="cuda")
assert answers.finite.known.get(bad) is None, "written to"
assert answers.finite.known.get(~torch.isinf(bad)) is True
del bad
assert not answers.finite.known.values, "nothing is kept"
"""


def test_checks_on_the_host_in_compiled_and_in_scripted_programs_are_as_before(phantom):
    # torch.jit.script reads the source, which a string has not.
    (phantom.folder / "program.py").write_text(ELSEWHERE)
    ran = phantom.run(
        None, code="import program", PYTHONPATH=f"{phantom.folder}:{ROOT / 'python_loader'}"
    )
    assert ran.code == 0, ran.out + ran.err


# More than the GPU has: a driver keeps of it there what there is room for.
MANAGED = """
import ctypes
import torch

start = ctypes.c_void_p()
assert not ctypes.CDLL(None).cudaMallocManaged(ctypes.byref(start), ctypes.c_size_t(3 << 30), 1)
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 512, device="cuda")).sum().backward()
    optimizer.step()
assert not ctypes.CDLL(None).cudaFree(start)
"""


def test_managed_memory_counts_as_the_hosts(tmp_path):
    (tmp_path / "train.py").write_text(MANAGED)
    ran = dryrun(tmp_path, "--gb", 2, "--alloc", "torch", "--json=all.json", "train.py")
    found = json.loads((tmp_path / "all.json").read_text())
    assert ran.returncode == 0 and found["trust"]["managed"] == 3 << 30
    assert found["gpus"][0]["runs"][0]["peak_held"] < 1 << 30
    assert "Managed memory, 3.00 GiB at most" in ran.stdout
