"""Dumps, snapshots from outside and traces of real PyTorch programs: read by torch's own viewers,
and replayed."""

import json
import subprocess
from pathlib import Path

import pytest

from conftest import COMMAND, GRUYERE, HERE, ROOT, clean_environment

PRELUDE = """
import os, pickle, subprocess, sys
import torch, gpu
gpu.install()
from gruyere._torch import stats
stats.install()
from torch.cuda import _memory_viz

def outside(*arguments):
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LD_", "PHANTOM_", "GRUYERE_CONF"))
    }
    return subprocess.run(
        [os.environ["GRUYERE_TEST_COMMAND"], *arguments],
        env=clean,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def opened(path):
    # What torch's own viewers make of it. memory() wants a script from the internet to draw with:
    # what it would be given will do.
    with open(path, "rb") as file:
        raw = file.read()
    assert raw[:2] == b"\\x80\\x04"
    snapshot = pickle.loads(raw)
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= set(
        snapshot
    )
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    pages = _memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)
    assert all("MemoryViz" in page and len(page) > 1000 for page in pages)
    drawn = (
        _memory_viz.memory(snapshot, lambda lines: lines),
        _memory_viz.segments(snapshot, lambda lines: lines),
    )
    assert drawn[0] and drawn[1]
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
    return snapshot

def same_keys(mine, torchs):
    assert set(torchs) <= set(mine), set(torchs) - set(mine)
"""


def run(phantom, code, **settings):
    path = f"{HERE / 'programs'}:{ROOT / 'python_loader'}"
    return phantom.run(
        "",
        code=PRELUDE + code,
        allocator="hooked",
        PYTHONPATH=path,
        GRUYERE_LIBRARY=GRUYERE,
        **settings,
    ).check()


@pytest.mark.parametrize("conf", ["", "backing:pool", "backing:passthrough"])
def test_a_snapshot_from_outside_opens_in_torchs_viewers_and_says_what_torch_says(phantom, conf):
    code = """
torch.cuda.memory._record_memory_history()
side = torch.cuda.Stream()
kept = [torch.empty(n * 1000, device="cuda") for n in range(1, 400)]
kept[5].record_stream(side)
later = [tensor + 1 for tensor in kept[::3]]
del kept[::2]
outside("snapshot", str(os.getpid()), "-o", "now.pickle")
snapshot = opened("now.pickle")
own = torch.cuda.memory._snapshot()
segments = snapshot["segments"]
blocks = [block for segment in segments for block in segment["blocks"]]
allocated = [block for block in blocks if block["state"] == "active_allocated"]
stats = torch.cuda.memory_stats()
assert sum(segment["allocated_size"] for segment in segments) == torch.cuda.memory_allocated()
assert sum(block["requested_size"] for block in allocated) == stats["requested_bytes.all.current"]
assert {block["address"] for block in allocated} == {
    tensor.data_ptr() for tensor in [*kept, *later]
}
# The library's own snapshot, in each place.
same_keys(snapshot, own)
same_keys(segments[0], own["segments"][0])
same_keys(segments[0]["blocks"][0], own["segments"][0]["blocks"][0])
same_keys(snapshot["device_traces"][0][0], own["device_traces"][0][0])
same_keys(snapshot["allocator_settings"], own["allocator_settings"])
def where(segments):
    # A row of pages in which small and large blocks lie is told in parts from inside.
    rows = []
    for at, bytes in sorted((segment["address"], segment["total_size"]) for segment in segments):
        if rows and sum(rows[-1]) == at:
            rows[-1] = (rows[-1][0], rows[-1][1] + bytes)
        else:
            rows.append((at, bytes))
    return rows
assert where(segments) == where(own["segments"])
assert all("lifetime" in block["frames"][0]["name"] for block in allocated)
gpu.report(traces=len(snapshot["device_traces"][0]))
"""
    # 399 blocks and a third of that; half of the first freed, in two entries each.
    assert run(phantom, code, GRUYERE_CONF=conf).report["traces"] >= 399 + 133 + 2 * 199


def test_the_dump_of_an_out_of_memory_opens_in_torchs_viewers_and_the_program_goes_on(
    phantom, tmp_path
):
    code = """
kept = [torch.empty(40 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
try:
    torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    said = str(error)
(name,) = [name for name in os.listdir("dumps") if name.endswith(".pickle")]
snapshot = opened(os.path.join("dumps", name))
assert (
    snapshot["device_traces"][0][-1]["action"] == "oom"
    and snapshot["device_traces"][0][-1]["size"] == 700 << 20
)
assert (
    sum(segment["allocated_size"] for segment in snapshot["segments"])
    == torch.cuda.memory_allocated()
    == 400 << 20
)
kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
gpu.report(said=said, name=name)
"""
    report = run(
        phantom,
        code,
        GRUYERE_CONF=f"dump_dir:{tmp_path / 'dumps'},headroom:0",
        PHANTOM_MEMORY="1GiB",
    ).report
    stem = (tmp_path / "dumps" / report["name"]).with_suffix("")
    state = json.loads(stem.with_suffix(".json").read_text())
    said, page = report["said"].rsplit("\nThe page: ", 1)
    assert Path(page).resolve() == stem.with_suffix(".html").resolve()
    assert state["out_of_memory"]["message"] == said
    conclusion = "".join(line + "\n" for line in state["conclusion"]["lines"])
    text = stem.with_suffix(".txt").read_text()
    # The exception's sentence, the conclusion, the rest of what the exception says.
    head, rest = said.split("\n", 1)
    assert text.startswith(f"{head}\n{conclusion}"), text
    assert all(line in text.splitlines() for line in rest.splitlines()), text
    assert state["conclusion"]["cause"] == "large_request"
    held = state["devices"][0]["held"]
    assert held["reserved_bytes"] == sum(
        value for key, value in held.items() if key != "reserved_bytes"
    )


def test_a_trace_of_a_training_program_has_its_peak_and_replays(phantom, tmp_path):
    code = """
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.randn(64 * (1 + step % 3), 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
peak, live = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
gpu.report(peak=peak, live=live)
"""
    report = run(phantom, code, GRUYERE_CONF=f"trace:{tmp_path}/own-%p.trace.zst").report
    (trace,) = tmp_path.glob("own-*.trace.zst")
    command = [COMMAND, "bench", "--trace", trace, "--json", "--out", tmp_path]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (told,) = json.loads(ran.stdout)["traces"]
    assert told["peak_live"] == report["peak"] > report["live"] > 0
    assert all(run["fault_count"] == 0 for run in told["runs"])
