"""Programs whose first steps are not the whole of them: what ends before its steps, optimisers that
step rarely, and programs that size themselves by the device."""

import json

import pytest

from dry_runs import dryrun, told

# A generator of 64 MiB that steps once for five steps of its critic.
GAN = """
import torch

generator = torch.nn.Linear(4096, 4096, bias=False).cuda()
critic = torch.nn.Linear(4096, 1).cuda()
of_critic = torch.optim.Adam(critic.parameters())
of_generator = torch.optim.Adam(generator.parameters())
for _ in range(STEPS):
    for _ in range(5):
        with torch.no_grad():
            made = generator(torch.empty(8, 4096, device="cuda"))
        critic(made).sum().backward()
        of_critic.step()
        of_critic.zero_grad()
    critic(generator(torch.empty(8, 4096, device="cuda"))).sum().backward()
    if STEPS == 9:
        of_generator.step()
    of_generator.zero_grad()
"""


def test_the_steps_go_on_until_a_rare_optimiser_has_its_states(tmp_path):
    (tmp_path / "train.py").write_text(GAN.replace("STEPS", "9"))
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["program"]["steps"] == 11
    # Its weight, gradient, and two states.
    assert document["peak"]["bytes"] > 4 * (64 << 20)
    assert document["peak"]["kinds"]["optimizer states"] > 2 * (64 << 20)


@pytest.mark.thorough
def test_an_optimiser_that_never_steps_is_the_first_thing_told(tmp_path):
    (tmp_path / "train.py").write_text(GAN.replace("STEPS", "8"))
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "Not trustworthy: after 30 steps the Adam made at train.py:7 had not stepped" in said
    assert "It fits" not in said


SKIPS = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    try:
        model(torch.empty(1 << 19, 1024, device="cuda")).sum().backward()
        optimizer.step()
    except torch.cuda.OutOfMemoryError:
        pass
"""


def test_a_program_that_leaves_out_each_batch_that_does_not_fit_does_not_fit(tmp_path):
    (tmp_path / "train.py").write_text(SKIPS)
    ran = dryrun(tmp_path, "--gb", 2, "--alloc", "torch", "--json=all.json", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "Not trustworthy: it made 0 of the 3 steps asked: it ran out of memory 9 times" in said
    assert "It fits" not in said
    document = json.loads((tmp_path / "all.json").read_text())
    assert not document["verdict"]["fits"] and not document["gpus"][0]["runs"][0]["fits"]


# A row takes about 8 KiB where the program thinks of 1.
SIZED = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
free, _ = torch.cuda.mem_get_info()
for _ in range(5):
    model(torch.empty(free >> 10, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_batch_sized_by_free_memory_that_does_not_fit_is_judged_at_the_gpus_size(tmp_path):
    (tmp_path / "train.py").write_text(SIZED)
    ran = dryrun(tmp_path, "--gb", 2, "--alloc", "torch", "--json=all.json", "train.py")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert (
        "It does not fit on 2gb: it sizes itself by the device's memory, which it asks for at "
        "train.py:6, and runs out of it."
    ) in said
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["sizing"]["asked"] == "train.py:6"
    assert document["trust"]["reasons"] == []


DRAWS = """
import random
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    rows = random.randrange(1, 1 << 20)
    model(torch.empty(rows, 64, device="cuda")).sum().item()
    model(torch.empty(rows, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.thorough
def test_random_numbers_of_the_host_are_not_laid_to_values_of_the_device(tmp_path):
    (tmp_path / "train.py").write_text(DRAWS)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    (reason,) = document["trust"]["reasons"]
    assert "with the same values" in reason and "random.seed" in reason


# A batch that the first step of an attempt has room for, and the second, with the optimiser's
# states, has not.
SEARCH = """
import torch
from torch import nn


def train(rows):
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(6):
        model(torch.empty(rows, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


rows = 1 << 15
while True:
    try:
        train(rows)
        break
    except torch.cuda.OutOfMemoryError:
        rows = int(rows * 0.9)
"""


def test_a_search_for_the_largest_batch_is_judged_by_the_one_that_it_found(tmp_path):
    (tmp_path / "train.py").write_text(SEARCH)
    ran = dryrun(tmp_path, "--gb", 2, "--context", 0, "--json", "train.py")
    found = told(ran)
    rows = found["gpus"][0]["runs"]
    assert all(row["caught"] > 3 and row["steps"] == 3 and not row["tight"] for row in rows)
    steps, peak = found["steps"], found["peak"]
    assert len(set(steps["activations"])) == 1 and len(steps["activations"]) == 3
    assert peak["refused"] and peak["kinds"]["optimizer states"] == 512 << 20
    assert peak["step"] > 1
