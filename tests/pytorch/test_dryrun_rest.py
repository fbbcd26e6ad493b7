"""What a dry run says of the rest of the program: it goes on after the steps, with a few batches of
each DataLoader, and some epochs without steps."""

import time

import pytest

from conftest import ROOT
from dry_runs import dryrun, row, told
from gruyere._bench.script import Enough
from gruyere._dryrun import report, rest
from gruyere._dryrun.lines import Lines
from gruyere._dryrun.rest import BATCHES, Rest

FRAMEWORKS = ROOT / ".venv-frameworks" / "bin" / "python"
MIB = 1 << 20

# Weights of 4 MiB, batches of 64 KiB, and an evaluation of SIZE rows of 4 KiB a batch; the
# optimiser's steps are counted.
EPOCHS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(TensorDataset(torch.zeros(6400, 1024)), batch_size=16)
held_out = DataLoader(TensorDataset(torch.zeros(ROWS, 1024)), batch_size=SIZE)
steps = 0
for epoch in range(LAST):
    for (x,) in batches:
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
        steps += 1
    with torch.no_grad():
        kept = []
        for (x,) in held_out:
            kept.append(model(x.cuda()))
            KEPT
    torch.save(model.state_dict(), "last.pt")
    END
"""


def program(folder, rows=4000, size=16, kept="kept.clear()", end="", epochs=100):
    text = EPOCHS.replace("ROWS", str(rows)).replace("SIZE", str(size))
    text = text.replace("LAST", str(epochs))
    (folder / "train.py").write_text(text.replace("KEPT", kept).replace("END", end))


def answer(folder, *arguments, code=0):
    return told(dryrun(folder, "--alloc", "torch", "--json", *arguments, "train.py"), code)


def test_an_evaluation_that_needs_no_more_is_run_and_said_to_need_no_more(tmp_path):
    program(tmp_path, end='assert len(kept) == 0 and steps == 3, "too far"')
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert (
        "What follows, up to train.py:11 where it trains again, with 4 batches of one DataLoader, "
        "needs no more."
    ) in said
    assert "until it stopped" not in said
    # Two analysed runs, one a row, and one of the rest.
    assert said.startswith("train.py: 4 runs of 3 steps; your files are unchanged.")
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_a_loader_made_for_one_loop_counts(tmp_path):
    program(tmp_path)
    text = (tmp_path / "train.py").read_text()
    loaders = [line for line in text.splitlines() if line.startswith("held_out = ")]
    made = loaders[0].removeprefix("held_out = ")
    text = text.replace(loaders[0], "#").replace("in held_out", f"in {made}")
    (tmp_path / "train.py").write_text(text)
    said = " ".join(dryrun(tmp_path, "--alloc", "torch", "train.py").stdout.split())
    assert "where it trains again, with 4 batches of one DataLoader, needs no more." in said


def test_an_evaluation_that_runs_out_of_memory_does_not_fit_and_its_line_is_named(tmp_path):
    program(tmp_path, rows=400_000, size=100_000)
    arguments = ("--gb", "0.5", "--context", "100MiB")
    ran = dryrun(tmp_path, "--alloc", "gruyere,torch", *arguments, "train.py")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "its steps do, and after them it runs out of memory at train.py:19: at least" in said
    document = answer(tmp_path, *arguments, code=3)
    found = row(document, "torch")
    assert found["after"] == "train.py:19"
    # Measured where there is room: a batch, and what the model makes of it, are 391 MiB each.
    assert found["margin"] < -250 * MIB and found["peak_live"] > 780 * MIB
    assert not found["at_size"]
    assert document["rest"]["needs_more"] and not document["trust"]["reasons"]


def test_a_peak_after_the_steps_is_the_answers_peak(tmp_path):
    program(tmp_path, rows=40_000, size=10_000)
    document = answer(tmp_path)
    # A batch, and what the model makes of it.
    assert row(document, "torch")["peak_live"] > 2 * 39 * MIB
    assert document["peak"]["phase"] == "after the steps"
    assert document["peak"]["line"] == "train.py:19"
    assert document["rest"]["peak_live"] == row(document, "torch")["peak_live"]


def test_an_evaluation_that_gathers_more_than_there_is_room_for_does_not_fit(tmp_path):
    program(tmp_path, rows=1000 * 1024, size=1024, kept="")
    document = answer(tmp_path, "--gb", "1", "--context", "100MiB", code=3)
    assert row(document, "torch")["after"] == "train.py:19"
    assert document["rest"]["needs_more"] and document["rest"]["growth"] is None


def test_what_an_evaluation_gathers_counts_and_so_does_joining_it(tmp_path):
    # 600 MiB of 870 MiB.
    program(tmp_path, rows=150 * 1024, size=1024, kept="")
    arguments = ("--gb", "1", "--context", "100MiB")
    document = answer(tmp_path, *arguments)
    assert row(document, "torch")["peak_live"] > 600 * MIB
    assert document["peak"]["phase"] == "after the steps"
    program(tmp_path, rows=150 * 1024, size=1024, kept="", end="torch.cat(kept)")
    document = answer(tmp_path, *arguments, code=3)
    assert row(document, "torch")["after"] == "train.py:22"


def test_few_batches_that_leave_something_behind_are_no_warning(tmp_path):
    program(tmp_path, rows=10 * 1024, size=1024, kept="")
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "But" not in ran.stdout


def test_what_comes_after_all_epochs_is_run_too(tmp_path):
    test = """if epoch == 2:
        assert steps == 3
        last = DataLoader(held_out.dataset, batch_size=100_000)
        [model(x.cuda()) for (x,) in last]
"""
    program(tmp_path, rows=200_000, end=test, epochs=3)
    document = answer(tmp_path, "--gb", "0.5", "--context", "100MiB", code=3)
    assert row(document, "torch")["after"] == "train.py:25"


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["sys.exit(0)", "steps = 1 / len(seen)", "try_much()"])
def test_the_programs_own_end_is_none_of_an_error(tmp_path, end):
    program(tmp_path, epochs=3)
    text = (tmp_path / "train.py").read_text()
    more = """
import sys
seen = []
def try_much():
    try:
        torch.empty(1 << 40, device="cuda")
    except RuntimeError:
        pass
"""
    begin = text.replace("    for (x,) in batches:", "    seen.clear()\n    for (x,) in batches:")
    begin = begin.replace("steps += 1", "steps += 1\n        seen.append(x)")
    fails = "seen" in end
    if fails:
        begin = begin.replace("    with torch.no_grad", f"    {end}\n    with torch.no_grad")
    else:
        begin += f"{end}\n"
    (tmp_path / "train.py").write_text(more + begin)
    found = answer(tmp_path)
    assert found["rest"]["stopped"] == ""
    assert bool(found["rest"]["again"]) == fails
    assert row(found, "torch")["caught"] == (end == "try_much()")


def test_a_loader_that_was_not_read_is_named(tmp_path):
    program(tmp_path)
    with open(tmp_path / "train.py", "a") as file:
        file.write("    if epoch == 90:\n        list(now_and_then)\n")
    text = (tmp_path / "train.py").read_text()
    more = 'now_and_then = DataLoader(["some"])\n# Its data is read by another one.\n'
    more += "first = DataLoader(held_out.dataset)\nsteps = 0\n"
    (tmp_path / "train.py").write_text(text.replace("steps = 0\n", more))
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "needs no more" not in said
    assert "But no batch was read of the DataLoader made at train.py:9: what it feeds" in said


@pytest.mark.thorough
def test_the_rest_is_not_known_where_a_value_of_the_device_may_end_the_loop_that_fills_it(tmp_path):
    loop = """count = torch.zeros((), device="cuda")
    while count.item() < 8:
        kept.append(torch.empty(4 << 20, device="cuda"))
        count += model.bias.detach()[0]
    """
    program(tmp_path, end=loop)
    document = answer(tmp_path, "--gb", "1", "--context", "100MiB")
    assert row(document, "torch")["fits"] and not document["rest"]["needs_more"]
    assert document["rest"]["stopped"].startswith("it ran out of memory in a loop")
    # What was read after the steps.
    assert document["trust"]["reads"][0]["line"] == "train.py:23"


@pytest.mark.thorough
def test_an_evaluation_does_not_fit_for_certain_only_if_it_does_without_masks(tmp_path):
    program(tmp_path, end="[kept.append(w[w > 3].repeat(400)) for w in model.parameters()]")
    document = answer(tmp_path, "--gb", "1", "--context", "100MiB", code=4)
    assert document["trust"]["reasons"][0].startswith("masks select every element")


@pytest.mark.thorough
def test_an_error_after_the_steps_is_told_and_the_steps_count(tmp_path):
    program(tmp_path, end='raise ValueError("no such metric")')
    document = answer(tmp_path)
    assert document["rest"]["stopped"] == "ValueError: no such metric"
    assert document["rest"]["line"] == "train.py:22"
    assert row(document, "torch")["fits"]


@pytest.mark.thorough
def test_what_a_program_may_keep_it_does_not_write_after_its_steps(tmp_path):
    program(tmp_path)
    assert answer(tmp_path, "--allow-writes=.")["rest"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_nothing_is_claimed_of_a_rest_in_which_no_loader_gave_a_batch(tmp_path):
    program(tmp_path, epochs=1)
    text = (tmp_path / "train.py").read_text()
    text = text[: text.index("    with torch.no_grad")].replace("held_out = ", "# ")
    (tmp_path / "train.py").write_text(text + "torch.save(model.state_dict(), 'last.pt')\n")
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "needs no more" not in said
    assert "not what comes later (longer input, an evaluation, a checkpoint)" in said
    assert "The rest of the program was run, and no other DataLoader gave a batch." in said


@pytest.mark.thorough
def test_a_loop_without_a_data_loader_is_not_run_further(tmp_path):
    loop = EPOCHS.replace("for (x,) in batches", "for x in torch.zeros(400, 16, 1024)")
    for name, number in (("ROWS", "4000"), ("SIZE", "16"), ("LAST", "3")):
        loop = loop.replace(name, number)
    (tmp_path / "train.py").write_text(loop)
    assert answer(tmp_path)["rest"] is None


# transformers keeps the logits of a whole evaluation on the device.
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        row = torch.zeros(64, dtype=torch.long)
        return {"input_ids": row, "labels": row}


shape = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2, vocab_size=4000)
arguments = TrainingArguments("out", report_to=[], eval_strategy="steps", eval_steps=100)
trainer = Trainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=Rows(),
                  eval_dataset=Rows(), compute_metrics=lambda _: {})
trainer.train()
"""


@pytest.mark.thorough
def test_a_trainer_evaluates_and_what_it_gathers_counts(tmp_path):
    (tmp_path / "train.py").write_text(TRAINER)
    ran = dryrun(tmp_path, "--alloc", "torch", "--json", "train.py", python=FRAMEWORKS)
    document = told(ran)
    # 4,000 rows of 64 logits for each of 4,000 words.
    assert row(document, "torch")["peak_live"] > 4000 * 64 * 4000 * 4
    assert not document["rest"]["stopped"] and document["rest"]["growth"] is None
    # Of 500: what the last few would keep is little.
    assert document["rest"]["batches"] > 480 and document["rest"]["loaders"] == 1
    assert document["rest"]["cut"] and document["rest"]["left"] < MIB


# An evaluation of 8 batches, each of which makes 1 MiB.
LIGHTNING = """
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 4096)
        self.kept = []

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, _):
        self.kept.append(self.net(batch[0]))

    def on_validation_epoch_end(self):
        CLEAR

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = TensorDataset(torch.zeros(512, 64))
trainer = pl.Trainer(max_epochs=20, accelerator="gpu", devices=1, logger=False,
                     check_val_every_n_epoch=EVERY, enable_checkpointing=False,
                     enable_progress_bar=False)
trainer.fit(Model(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=64))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("clear", "every", "claimed", "left"),
    [
        ("pass", 1, False, "left 8 MiB behind: if each later one does, 1gb is full after 27 more"),
        ("self.kept.clear()", 1, True, ""),
        # None is run.
        ("pass", 2, False, ""),
    ],
)
def test_of_a_trainer_that_is_told_to_stop_only_what_it_ran_is_claimed(
    tmp_path, clear, every, claimed, left
):
    text = LIGHTNING.replace("CLEAR", clear).replace("EVERY", str(every))
    (tmp_path / "train.py").write_text(text)
    ran = dryrun(tmp_path, "--alloc", "torch", "--gb", "1", "train.py", python=FRAMEWORKS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "The rest of the program, with" not in said
    ran_then = "What ran once the trainer was told to stop, with 8 batches of one DataLoader, needs"
    assert (ran_then in said) == claimed
    assert left in said and bool(left) == ("each later one" in said)


# Without a device.


class Loader:
    def __len__(self):
        return 40


def begun(monkeypatch, **settings):
    for name, value in settings.items():
        monkeypatch.setattr(rest, name, value)
    found = Rest(True)
    found.lines = Lines("/")
    found.feeding = rest._Iteration(Loader(), "train.py:1")
    assert found.begin(False)
    return found


def test_a_rest_that_does_not_end_is_ended(monkeypatch):
    found = begun(monkeypatch, _SECONDS=0.2)
    deadline = time.monotonic() + 30
    with pytest.raises(Enough):
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert "takes more than" in found.facts()["stopped"]


def test_a_rest_that_takes_the_hosts_memory_is_ended(monkeypatch):
    taken = iter([100, *[170] * 1000])
    found = begun(monkeypatch, _resident=lambda: next(taken), _available=lambda: 120)
    deadline = time.monotonic() + 30
    with pytest.raises(Enough):
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert found.facts()["stopped"] == "it needs more than half of the host's free memory"


@pytest.mark.parametrize(
    ("live", "grown"),
    [
        # The first batch may leave more behind, and one must leave nothing.
        ((0, 90, 100, 110, 120), 10),
        ((0, 90, 100, 100, 120), 0),
        ((0, 90, 90, 90, 90), 0),
        ((100, 90), 0),
    ],
)
def test_batches_leave_behind_what_every_one_but_the_first_does(live, grown):
    iteration = rest._Iteration(Loader(), "train.py:1")
    iteration.live = list(live)
    assert len(live) <= BATCHES + 1 and iteration.growth() == grown
    assert iteration.batches == 40


@pytest.mark.parametrize(
    ("a_batch", "is_patient", "given"),
    [
        (1000, True, 40),
        (1000, False, BATCHES),
        # 36 batches more, of a hundredth of what is live.
        (2, True, BATCHES),
        (0, True, BATCHES),
    ],
)
def test_batches_that_leave_much_behind_are_all_given_as_long_as_there_is_time(
    monkeypatch, a_batch, is_patient, given
):
    found = begun(monkeypatch, _SECONDS=1000)
    found.patience = time.monotonic() + (1000 if is_patient else -1)
    iteration = rest._Iteration(Loader(), "train.py:7")
    iteration.live = [10_000]
    while len(iteration.live) <= 40 and not found._has_enough(iteration):
        iteration.live.append(iteration.live[-1] + a_batch)
    assert len(iteration.live) - 1 == given
    growth = found.facts()["growth"]
    assert growth == (
        {"bytes_a_batch": 1000, "batches": 40, "given": BATCHES, "line": "train.py:7"}
        if a_batch and not is_patient
        else None
    )


@pytest.mark.parametrize(
    ("batches", "spare", "said"),
    [
        (40, 30 * MIB, ["4 of 40 were run in the time that there is: after 30 more h100-80"]),
        (40, 50 * MIB, ["if all are joined (torch.cat), h100-80 has no room for both"]),
        (40, 80 * MIB, []),
        (None, 1000 * MIB, ["and 4 were run in the time that there is: after 1,000 more h100-80"]),
    ],
)
def test_an_evaluation_that_was_not_run_to_its_end_is_not_said_to_fit(batches, spare, said):
    growth = {"bytes_a_batch": MIB, "batches": batches, "given": 4, "line": "train.py:7"}
    reasons = report._gathered(growth, spare, "h100-80")
    assert len(reasons) == len(said)
    for reason, words in zip(reasons, said):
        start = "each batch of the DataLoader at train.py:7 leaves 1 MiB behind"
        assert reason.startswith(start) and words in reason
