"""Fragmentation, idle, unused and the peak ratio are one number each, wherever they are asked for:
every command's `--json`, the statistics and the dump of a real program that runs."""

import pytest

from conftest import GRUYERE, HERE, ROOT

PRELUDE = """
import json, os, subprocess, sys
import torch, gpu
gpu.install()
import gruyere

def outside(*arguments):
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LD_", "PHANTOM_", "GRUYERE_CONF"))
    }
    done = subprocess.run(
        [os.environ["GRUYERE_TEST_COMMAND"], *arguments], env=clean, capture_output=True, text=True
    )
    assert done.returncode in (0, 4), done.stderr
    return done.stdout
"""

# Weights that stay, and what each step needs, which lies idle between the steps.
TRAINING = """
weights = [torch.empty(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
small = [torch.empty(1000 + n, device="cuda") for n in range(200)]
for step in range(4):
    activations = [torch.empty(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(48)]
    del activations
    gruyere.step()
"""

# One that stops between two events which write the gauges: it marks no step, and a few frees leave
# holes of half a page.
QUIET = """
kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(128)]
del kept[::2]
"""

ASKED = """
pid = str(os.getpid())
KEYS = ["fragmentation", "fragmentation_by", "typical_request_bytes", "lost_bytes", "idle_bytes",
        "unused", "peak_ratio"]
pick = lambda told: [told[key] for key in KEYS]
told = {
    "ps": pick([process for process in json.loads(outside("ps", "--json"))["processes"]
                if process["pid"] == os.getpid()][0]["devices"][0]),
    "stat": pick(json.loads(outside("stat", pid, "--json"))["devices"][0]),
    "top": pick(json.loads(outside("top", pid, "--json", "--count", "1"))
                ["processes"][0]["devices"][0]),
    "map": pick(json.loads(outside("map", pid, "--json"))),
}
snapshot = outside("snapshot", pid, "--json", "-o", "-")
told["snapshot"] = pick(json.loads(snapshot)["devices"][0]["shares"])
posted = json.loads(outside("post", pid, "--json"))
told["post"] = pick(posted["state"]["devices"][0]["shares"])
metrics = dict(
    (line.split("{")[0], float(line.rsplit(" ", 1)[1]))
    for line in outside("export", "--print").splitlines()
    if "{" in line and f'pid="{pid}"' in line
)
exported = [metrics["gruyere_" + name] for name in (
    "fragmentation_ratio", "typical_request_bytes", "lost_bytes", "idle_bytes", "unused_ratio",
    "peak_ratio")]
seen = lambda threshold: json.loads(
    outside("watch", pid, threshold, "--json", "--exit").splitlines()[0]
)["value"]
watched = [seen("fragmentation>=0%"), seen("lost>=0"), seen("idle>=0"), seen("unused>=0%")]
reported = json.loads(outside("report", pid, "--json"))["devices"][0]["now"]["peak_ratio"]
"""

REPORTED = """
gpu.report(
    own=[own.fragmentation, own.lost, own.idle, own.unused, own.reserved_peak / own.live_peak],
    told=told, exported=exported, watched=watched, reported=reported,
)
"""

# gruyere.stats writes the gauges: from here on nothing changes.
EVERYWHERE = "own = gruyere.stats()\n" + ASKED + REPORTED
# Here it writes them after all commands were asked.
WITHOUT_GAUGES = ASKED + "own = gruyere.stats()\n" + REPORTED


def run(phantom, code, **settings):
    return phantom.run(
        "",
        code=PRELUDE + code,
        allocator="hooked",
        PYTHONPATH=f"{HERE / 'programs'}:{ROOT / 'python_loader'}",
        GRUYERE_LIBRARY=GRUYERE,
        **settings,
    ).check()


@pytest.mark.parametrize("conf", ["", "backing:pool", "backing:fixed", "backing:passthrough"])
def test_every_command_says_the_same_of_a_program_that_runs(phantom, conf):
    said = run(phantom, TRAINING + EVERYWHERE, GRUYERE_CONF=conf).report
    fragmentation, lost, idle, unused, ratio = said["own"]
    by, request = said["told"]["stat"][1:3]
    assert by == ("pages" if conf == "" else "typical request")
    assert (request == 0) == (conf == "")
    for command, told in said["told"].items():
        assert told == [fragmentation, by, request, lost, idle, unused, ratio], command
    assert said["exported"] == [fragmentation, request, lost, idle, unused, ratio]
    assert said["watched"] == [fragmentation, lost, idle, unused]
    assert said["reported"] == ratio


@pytest.mark.parametrize("conf", ["", "backing:pool", "backing:fixed"])
def test_every_command_says_the_same_of_a_program_at_rest_whose_gauges_are_old(phantom, conf):
    said = run(phantom, QUIET + WITHOUT_GAUGES, GRUYERE_CONF=conf).report
    maps = said["told"].pop("map")
    keys = ["fragmentation", "by", "request", "lost", "idle", "unused", "ratio"]
    of_map = dict(zip(keys, maps))
    # The holes are there to be seen, and no gauge has said so.
    assert of_map["lost"] >= 32 << 20
    for command, told in said["told"].items():
        assert told == maps, command
    assert said["watched"] == [of_map[key] for key in ("fragmentation", "lost", "idle", "unused")]
    if conf == "":
        # The process itself, which looks at its own books. (Where pages do not move, it knows more
        # requests by then than the gauge that a reader goes by.)
        assert said["own"][1] == of_map["lost"]


def test_a_healthy_program_shows_no_fragmentation_and_passes_no_alert(phantom):
    code = TRAINING + """
screen = outside("top", str(os.getpid()), "--once")
passed = outside("watch", str(os.getpid()), "fragmentation>30%", "--for", "300ms")
own = gruyere.stats()
gpu.report(screen=screen, passed=passed, fragmentation=own.fragmentation, unused=own.unused)
"""
    ran = run(phantom, code, GRUYERE_CONF="alert:fragmentation>30%=log")
    said = ran.report
    assert said["unused"] > 0.5, "the field's ratio would have called it torn"
    assert said["fragmentation"] < 0.02
    assert said["passed"] == "" and "is passed" not in ran.err
    assert "LOST" in said["screen"]
