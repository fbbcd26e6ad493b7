"""Starts dry runs as a user does, and reads their answers."""

import json
import subprocess
import sys

from conftest import COMMAND, GRUYERE, PHANTOM, clean_environment


# What takes time on the stand-in's clock, as the dry run has it.
CLOCK = {"PHANTOM_KERNEL_NS": "20000", "PHANTOM_COSTS": "launches"}


# Two layers that repeat, with a head; Adam; the numbers that torch has at the end on stdout.
TRAIN = """
import sys
import torch
from torch import nn

width, steps = int(sys.argv[1]), int(sys.argv[2])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def report():
    if torch.cuda.is_initialized():
        statistics = torch.cuda.memory_stats()
        print(statistics["allocated_bytes.all.peak"], statistics["requested_bytes.all.peak"])


model = Model().cuda()
optimizer = torch.optim.Adam(model.parameters())
try:
    for step in range(steps):
        batch = torch.empty(256 + 64 * step, width, device="cuda")
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    report()
"""


def dry(*arguments, python=sys.executable):
    """The command line, and the environment for it."""
    environment = clean_environment() | {
        "GRUYERE_LIBRARY": str(GRUYERE), "GRUYERE_PHANTOM": str(PHANTOM), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    line = [COMMAND, "dryrun", "--python", python, *arguments]
    return [str(word) for word in line], environment


def dryrun(folder, *arguments, python=sys.executable, **settings):
    line, environment = dry(*arguments, python=python)
    return subprocess.run(
        line,
        env=environment | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


def told(ran, code=0):
    """The JSON of a run with `--json`."""
    assert ran.returncode == code, ran.stdout + ran.stderr
    document = json.loads(ran.stdout)
    assert (document["schema"], document["version"]) == ("gruyere.dryrun", 1)
    assert document["verdict"]["exit"] == code
    return document


def row(document, allocator):
    return next(row for row in document["gpus"][0]["runs"] if row["allocator"] == allocator)
