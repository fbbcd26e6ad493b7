"""Programs that ask the device for values: what a dry run answers, what it says of that, and
whether its figures can be trusted."""

import json
import types

import pytest

from conftest import PHANTOM
from dry_runs import dryrun, told
from framework_runs import PYTHON as FRAMEWORKS
from gruyere._dryrun import answers


# What the stand-in invents is in the environment too, where every stand-in has it.
BRANCHES = """
import os
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    out = model(torch.empty(8, 64, device="cuda")).sum()
    if {condition}:
        more = torch.empty(1 << 20, device="cuda")
    out.backward()
    optimizer.step()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "condition", ['os.environ["PHANTOM_VALUES"] != "zeros"', "out.item() != 0"]
)
def test_a_program_that_asks_by_values_of_the_device_is_not_trusted(tmp_path, condition):
    if "item" in condition and b"PHANTOM_VALUES" not in PHANTOM.read_bytes():
        pytest.skip("this stand-in has no values of its own")
    (tmp_path / "train.py").write_text(BRANCHES.format(condition=condition))
    ran = dryrun(tmp_path, "--alloc", "torch", "--json=all.json", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    _, first, second, *_ = ran.stdout.splitlines()
    assert first.startswith("Not trustworthy: ") and "train.py:10" in first + second
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["trust"]["difference"]["line"] == "train.py:10"
    if "item" in condition:
        assert document["trust"]["difference"]["read"] == "train.py:9"
        read = {"line": "train.py:9", "what": "item", "inside": "", "count": 3}
        assert document["trust"]["reads"] == [read]
        assert document["trust"]["host_reads"]["count"] == 3


# Takes 64 MiB in each turn before the first step.
TURNS = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count, kept, data = torch.zeros((), device="cuda"), [], [0] * 40
{loop}
    kept.append(torch.empty(16 << 20, device="cuda"))
    count += model.bias.detach()[0]
    {read}
model(torch.empty(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "read", "code"),
    [
        ("while count.item() < 8:", "", 4),
        ("for _ in torch.utils.data.DataLoader(data):", "print(count.item())", 3),
    ],
)
def test_out_of_memory_is_certain_only_if_no_value_of_the_device_may_end_its_loop(
    tmp_path, loop, read, code
):
    (tmp_path / "train.py").write_text(TURNS.format(loop=loop, read=read))
    arguments = ("--alloc", "torch", "--gb", "1", "--context", "100MiB")
    ran = dryrun(tmp_path, *arguments, "train.py")
    assert ran.returncode == code, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    if code == 4:
        assert (
            "Not trustworthy: it ran out of memory in a loop that has read from the GPU 15 times, "
            "at train.py:7, and whose end may be a value that the stand-in only invents."
        ) in said
    else:
        assert "It does not fit on 1gb: at least 1.63 GiB too small." in said


COUNTED = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = torch.tensor({zero}, device="cuda")
for _ in range(5):
    out = model(torch.empty(8, 64, device="cuda")).sum()
    count += out.detach().to(count.dtype)
    if count.item() > 0:
        more = torch.empty(1 << 20, device="cuda")
    out.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("zero", ["0.0", pytest.param("0", marks=pytest.mark.thorough)])
def test_a_number_that_the_host_copied_is_not_known_once_a_kernel_has_written_to_it(tmp_path, zero):
    (tmp_path / "train.py").write_text(COUNTED.format(zero=zero))
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "after a value was read at train.py:10" in " ".join(ran.stdout.split())


# Each line that reads from the device ends with the name under which that is told, and how often.
READS = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.empty(64, device="cuda")
mask = torch.empty(64, device="cuda") > 0
torch.nonzero(x)  # operator 1
torch.where(mask)  # operator 1
x.masked_select(mask)  # operator 1
x.unique()  # operator 1
mask.long().bincount()  # operator 2
torch.equal(x, x + 1)  # operator 1
x.cpu().numpy()  # cpu 1
torch.empty(64).copy_(x)  # operator 1
x.to("cpu", torch.double)  # to 1
x[mask] = 1
x.masked_fill_(mask, 2)
x.nonzero_static(size=8)
if x.any():  # bool 1
    pass


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient[gradient > 0].numel()  # operator 1


def kept(x):
    return x[torch.empty(8, device="cuda") > 0]  # operator 1


out = kept(Masked.apply(model(torch.ones(8, 64, device="cuda"))))
loss = out.sum()
loss.backward()  # operator 1
optimizer.step()
if loss.item() > 0.01:  # item 1
    more = torch.empty(1 << 22, device="cuda")
"""


@pytest.mark.thorough
def test_every_read_of_the_device_has_its_line_also_where_the_runs_part(tmp_path):
    (tmp_path / "train.py").write_text(READS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    wanted = {
        (f"train.py:{number}", *line.rpartition("  # ")[2].split())
        for number, line in enumerate(READS.splitlines(), 1)
        if "  # " in line
    }
    trust = document["trust"]
    found = {(read["line"], read["what"], str(read["count"])) for read in trust["reads"]}
    assert found == wanted
    assert trust["host_reads"]["count"] == sum(read["count"] for read in trust["reads"])
    line = READS[: READS.index("if loss.item()")].count("\n") + 1
    parted = trust["difference"]
    assert (parted["line"], parted["read"]) == (f"train.py:{line + 1}", f"train.py:{line}")


# Bytes that the host copies to the device, and whose memory other tensors get.
REUSED = """
import torch

copied = [torch.full((100,), 7, dtype=torch.uint8).cuda() for _ in range(64)]
del copied
kept = []
for _ in range(8):
    drawn = torch.randint(0, 9, (64, 1), device="cuda")
    kept.append(torch.empty(1 << 20, device="cuda"))
    if drawn.float().mean().item() > 0:
        break
"""


def test_what_was_copied_to_memory_is_not_read_from_the_tensor_that_has_it_next(tmp_path):
    (tmp_path / "train.py").write_text(REUSED)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    assert document["trust"]["difference"]["read"] == "train.py:10"


SCALED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.ones(8, 64, device="cuda")).sum()
    scaler.scale(loss).backward()
    print(loss)
    objects = [None]
    dist.all_gather_object(objects, {"loss": 1})
    assert objects == [{"loss": 1}]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_what_a_scaler_a_print_and_a_gathering_ask_is_answered_and_told(tmp_path):
    (tmp_path / "train.py").write_text(SCALED)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 3
    assert document["trust"]["reasons"] == []
    asked = (answers.INFINITE, answers.PRINTED, answers.OBJECTS)
    assert document["trust"]["answered"] == dict.fromkeys(asked, 3)


def test_deepspeed_is_told_that_no_gradient_is_infinite():
    utils = types.ModuleType("deepspeed.runtime.utils")
    exec(
        "asked = []\n"
        "def has_inf_or_nan(x):\n    asked.append(x)\n    return True\n"
        "class CheckOverflow:\n"
        "    def has_overflow(self, params):\n        return any(map(has_inf_or_nan, params))\n",
        vars(utils),
    )
    asks = answers.Answers()
    asks._overflows(utils)
    assert utils.CheckOverflow().has_overflow([1, 2]) is False
    # Of each, since none of them ended the search.
    assert utils.asked == [1, 2]
    assert asks.answered == {answers.OVERFLOW: 3}


def test_generation_ends_at_its_greatest_length_whatever_the_device_says():
    class MaxLengthCriteria:
        max_length = 8

        def __call__(self, input_ids, scores):
            return "on the device"

    class GenerationMixin:
        def _has_unfinished_sequences(self, this_peer_finished, synced_gpus, device):
            return not this_peer_finished

    asks = answers.Answers()
    asks._lengths(types.SimpleNamespace(MaxLengthCriteria=MaxLengthCriteria))
    asks._generation(types.SimpleNamespace(GenerationMixin=GenerationMixin))
    for _ in range(2):
        mixin, length, invented = GenerationMixin(), 3, False
        while mixin._has_unfinished_sequences(invented, False, device="cuda"):
            length += 1
            tokens = types.SimpleNamespace(shape=(2, length))
            assert MaxLengthCriteria()(tokens, None) == "on the device"
            invented = length == 5
        assert length == 8
    assert asks.answered == {answers.GENERATED: 2}


# A layer that convolves by Fourier transforms, and an optimiser that takes roots of matrices.
FACTORS = """
import torch

weight = torch.nn.Parameter(torch.nn.init.orthogonal_(torch.empty(64, 64, device="cuda")))


class Whitened(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        gradient = weight.grad
        values, vectors = torch.linalg.eigh(gradient @ gradient.t())
        root = vectors @ torch.diag(values.clamp_min(1e-6) ** -0.5) @ vectors.t()
        weight.sub_(torch.linalg.solve(root, gradient) + torch.linalg.inv(root))


optimizer = Whitened([weight], {})
for _ in range(5):
    x = torch.ones(16, 64, device="cuda")
    product = torch.fft.rfft(x, n=128) @ torch.fft.rfft(weight, n=128).t()
    torch.fft.irfft(product).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_a_program_that_factors_matrices_is_trusted_and_what_that_takes_is_told(tmp_path):
    (tmp_path / "train.py").write_text(FACTORS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 3
    # Of eigh, solve and inv.
    assert document["trust"]["answered"] == {"torch.linalg: every matrix could be factored": 3 * 3}
    unknown = {
        cost["name"]: cost["source"] for cost in document["fixed_costs"] if cost["bytes"] is None
    }
    # orthogonal_, once.
    assert "cusolverDnSorgqr x1" in unknown["workspaces of cuSOLVER"]
    # Two lengths there, one back, and the gradients of two.
    assert unknown["workspaces of cuFFT"].endswith("cufftXtMakePlanMany x5")
    assert "workspaces of cuDNN" not in unknown


# Training as frameworks drive it, which would go on long after three steps.
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        row = torch.zeros(32, dtype=torch.long)
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


shape = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2, vocab_size=100)
arguments = TrainingArguments("out", report_to=[], save_strategy="epoch", logging_steps=1)
trainer = Trainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=Rows())
try:
    trainer.train()
finally:
    open("ended", "w").close()
open("went on", "w").close()
"""


LIGHTNING = """
import pytorch_lightning as pl
import torch


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_fit_end(self):
        open("ended", "w").close()


data = torch.utils.data.TensorDataset(torch.zeros(4096, 64))
trainer = pl.Trainer(max_epochs=2, accelerator="gpu", devices=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
open("went on", "w").close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program, module", [(TRAINER, "LlamaForCausalLM.model"), (LIGHTNING, "Model.net")]
)
def test_a_trainer_is_asked_to_stop_and_can_be_trusted(tmp_path, program, module):
    (tmp_path / "train.py").write_text(program)
    ran = dryrun(
        tmp_path, "--allow-writes=.", "--alloc", "torch", "--json", "train.py", python=FRAMEWORKS
    )
    document = told(ran)
    # Lightning stops at the end of an epoch at the earliest, if nobody makes it.
    assert 3 <= document["program"]["steps"] <= 5
    assert document["trust"]["reasons"] == []
    assert (tmp_path / "ended").exists() and not (tmp_path / "went on").exists()
    assert not list(tmp_path.glob("out/checkpoint*")), "nothing is saved that was not trained"
    assert any(row["module"].startswith(module) for row in document["peak"]["modules"])


# What programs do that measure and tune themselves: the figures are of the whole run all the same,
# and each row has its own allocator. An average of the weights has no forward; a nested backward
# and a step inside of one; a gradient that is sparse; an end that fails because it came early.
OF_ITS_OWN = """
import os

# No workspace of cuBLAS decides where the peak is.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
os.environ["CUBLASLT_WORKSPACE_SIZE"] = "64"
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True,max_split_size_mb:64"
import copy
import gruyere
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

gruyere.enable(limit="90%")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 1024, sparse=True)
        self.first = nn.Linear(1024, 1024)
        self.second = nn.Linear(1024, 1024)

    def forward(self, rows):
        return self.second(checkpoint(self.first, self.table(rows), use_reentrant=True))


def step_in_backward(model):
    for layer in (model.first, model.second):
        for parameter in layer.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(value, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)


def main():
    model = Model().cuda()
    average = copy.deepcopy(model)
    step_in_backward(model)
    for _ in range(9):
        torch.cuda.memory._record_memory_history()
        rows = torch.zeros(4096, dtype=torch.long, device="cuda")
        loss = model(rows).sum()
        torch.cuda.memory._record_memory_history(enabled=None)
        loss.backward()
        torch.cuda.reset_peak_memory_stats()
    return average


try:
    main()
finally:
    print(summary)
"""


@pytest.mark.thorough
def test_what_a_program_measures_and_sets_by_itself_changes_no_answer(tmp_path):
    (tmp_path / "train.py").write_text(OF_ITS_OWN)
    document = told(dryrun(tmp_path, "--alloc", "gruyere,expandable", "--json", "train.py"))
    assert document["trust"]["reasons"] == []
    assert document["program"]["left_out"] == [
        "expandable_segments:True,max_split_size_mb:64", "gruyere.enable(limit='90%')",
    ]  # fmt: skip
    peak = document["peak"]
    for run in document["gpus"][0]["runs"]:
        assert (run["fits"], run["steps"], run["peak_live"]) == (True, 3, peak["bytes"])
    layer, rows = 4 * 1024 * 1024 + 4 * 1024, 4096
    weights = 4 * 16 * 1024 + 2 * layer
    assert peak["kinds"] == {
        "weights": 2 * weights,
        # The first layer's, and the table's of the step before: values and indices.
        "gradients": layer + rows * (4 * 1024 + 8),
        "optimizer states": 0,
        # The checkpoint's input, the rows, the loss and its gradient.
        "activations": rows * (4 * 1024 + 8) + 2 * 512,
        # The rows behind the checkpointed layer.
        "recomputed": rows * 4 * 1024,
        "temporaries": peak["kinds"]["temporaries"],
        "workspaces": peak["kinds"]["workspaces"],
        "other": 0,
    }
    text = OF_ITS_OWN.splitlines()
    lines = {text[int(part["line"].split(":")[1]) - 1].strip() for part in peak["lines"]}
    assert "loss.backward()" in lines


# A program that takes as much as it may.
ASKS = """
import sys
import torch

wanted, context = map(int, sys.argv[1:])
free, total = torch.cuda.mem_get_info()
assert total == torch.cuda.get_device_properties(0).total_memory == wanted, (total, wanted)
assert context <= total - free <= context + (64 << 20), (free, total)
# Only here is the device's name the GPU's alone.
assert "stand-in" not in torch.cuda.get_device_name(), torch.cuda.get_device_name()
torch.cuda.set_per_process_memory_fraction(0.5)
blocks = []
try:
    while True:
        blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    pass
# Half of what the context leaves would be 5 blocks less; torch holds segments of 20 MiB.
assert 0 <= total // 2 // (64 << 20) - len(blocks) <= 1, len(blocks)
"""


@pytest.mark.thorough
def test_a_program_that_asks_is_told_the_gpus_total_and_the_contexts_part_as_taken(tmp_path):
    (tmp_path / "train.py").write_text(ASKS)
    ran = dryrun(tmp_path, "--gb", 8, "--context", "640MiB", "--json", "train.py",
                 8 << 30, 640 << 20)  # fmt: skip
    document = told(ran)
    assert [row["outcome"] for row in document["gpus"][0]["runs"]] == ["completed"] * 3
    assert document["gpus"][0]["usable"] == (8 << 30) - (640 << 20)
