"""How the package reads the arguments of `gruyere dryrun`: the GPUs, the sweep, the request."""

import json
import math
import os
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "python_loader"))

from gruyere import GruyereError  # noqa: E402
from gruyere._dryrun import gpus, main  # noqa: E402
from gruyere._dryrun.sweep import Sweep  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20


def ids(found):
    return [gpu["id"] for gpu in found]


def test_a_gpu_is_found_by_its_id_and_by_its_model_if_that_has_one_size():
    assert gpus.find("H100-80")["multiprocessors"] == 132
    assert gpus.find("h100")["id"] == "h100-80"
    assert gpus.find("4090")["id"] == "rtx4090-24"
    with pytest.raises(GruyereError, match="--gpu a100: sold in .* a100-40, a100-80"):
        gpus.find("a100")
    with pytest.raises(GruyereError, match="--gpu h99: unknown GPU; use --gb N"):
        gpus.find("h99")


def test_a_gpu_that_is_named_twice_is_run_once():
    assert ids(gpus.chosen(["h100", "a100-40", "h100-80"], [24.0, 24.0], None)) == [
        "h100-80", "a100-40", "24gb"
    ]  # fmt: skip


def test_the_gpu_that_is_run_is_none_of_the_others():
    assert ids(gpus.chosen([], [], None)) == [gpus.USUAL]
    others = ids(gpus.others([], []))
    assert gpus.USUAL not in others and len(others) == len(gpus.known()) - 1
    assert gpus.others(["h100"], []) == gpus.others([], [24.0]) == []


def test_a_size_makes_a_gpu_like_the_usual_one():
    gpu = gpus.of_size(23.5)
    assert (gpu["id"], gpu["memory"], gpu["capability"]) == ("23.5gb", 24064 * MIB, "9.0")


def test_a_context_of_the_users_is_that_of_every_gpu():
    for gpu in gpus.chosen(["h100"], [24.0], 300 * MIB):
        said = gpu["context"], gpu["context_known"], gpu["context_source"]
        assert said == (300 * MIB, True, "--context")
    assert gpus.find("h100")["context"] != 300 * MIB


def test_the_list_has_every_gpu_without_an_address_in_105_columns():
    text = gpus.table()
    assert all(f"{id:<17} " in text for id in ids(gpus.known()))
    assert "MiB?" in text and "?: from those on\nsimilar GPUs" in text
    assert "https://" not in text and all(len(line) <= 105 for line in text.splitlines())


def test_no_gpu_has_more_memory_than_it_is_sold_with():
    for gpu in gpus.known():
        sold = int(gpu["id"].rpartition("-")[2]) * GIB
        # B200 is sold with 180 GB and with 192 GB, of 1000^3 or of 1024^3.
        assert 0.8 * sold < gpu["memory"] <= sold, gpu["id"]
        assert gpu["memory_source"].startswith("https://"), gpu["id"]


def test_every_context_follows_from_the_messages_in_the_docs():
    """The rule is in docs/gpus.md."""
    rows = {row["id"]: row for row in gpus.rows()}

    def family(id):
        return rows[id]["capability"].replace("10.0", "9.0")

    counted = []
    for line in (ROOT / "docs" / "gpus.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 7:
            continue
        number, unit = cells[3].split()
        reserved = float(number) * (1 if unit == "MiB" else 1024)
        mebibytes = round((float(cells[1]) - float(cells[2])) * 1024 - reserved)
        assert cells[4] == str(mebibytes), line
        if cells[6].startswith("yes"):
            assert mebibytes <= 1024, line
            counted.append((cells[0].strip("`"), mebibytes, cells[5]))
    assert counted
    largest = {}
    for id, mebibytes, _ in counted:
        largest[id] = max(mebibytes, largest.get(id, 0))
    for id, row in rows.items():
        if len({thread for of, _, thread in counted if of == id}) > 1:
            wanted = gpus.SEEN, largest[id]
        else:
            like = [one for one in counted if family(one[0]) == family(id)]
            share = max(one[1] / rows[one[0]]["multiprocessors"] for one in like)
            least = min(largest[one[0]] for one in like)
            scaled = math.ceil(share * row["multiprocessors"] - 1e-9)
            wanted = gpus.LIKE, max(scaled, least)
        assert (row["context"], row["context_mib"]) == wanted, id


def test_a_sweep_is_a_list_or_a_range_of_a_place_or_a_flag():
    listed = Sweep("batch=1,2,4", ("--batch={batch}",))
    assert (listed.values, listed.range, listed.flag) == (["1", "2", "4"], None, None)
    bisected = Sweep("batch=--per-device:1..64", ())
    assert (bisected.range, bisected.flag) == ((1, 64), "--per-device")


@pytest.mark.parametrize(
    "text, reason",
    [
        *((text, "expected NAME=1,2,4 or NAME=1..64") for text in ("batch", "=1", "batch=")),
        ("batch=1,,2", "expected NAME=1,2,4"),
        ("batch=--batch:", "expected NAME=1,2,4"),
        ("batch=4..1", "4..1: expected whole numbers, as in 1..64"),
        ("batch=a..b", "a..b: expected whole numbers"),
    ],
)
def test_a_sweep_that_is_none_is_refused_with_its_words(text, reason):
    with pytest.raises(GruyereError) as refused:
        Sweep(text, ("{batch}",))
    assert str(refused.value).startswith(f"--sweep {text}: ") and reason in str(refused.value)


def test_a_sweep_without_a_place_in_the_program_is_refused():
    with pytest.raises(GruyereError, match="--sweep batch: .* have no {batch}; .*1..64"):
        Sweep("batch=1,2", ("--batch",))


def request(tmp_path, **changes):
    """The request of `gruyere dryrun train.py` (crates/cli/tests/dryrun.rs), with other values."""
    (tmp_path / "train.py").touch()
    return {
        "script": str(tmp_path / "train.py"), "arguments": [], "python_options": [],
        "run_name": "train", "gpu": [], "gb": [], "steps": 3,
        "alloc": ["gruyere", "torch", "expandable"], "sweep": None, "smallest": False,
        "context": None, "max_gb": None, "ranks": None, "json": None, "html": None,
        "history": None, "name": None,
        "timeout": 3600, "jobs": None,
        "sandbox": {"allow_writes": [], "allow_network": False, "scratch": 10 * GIB},
        "gruyere": "0.1.0", "beside": None,
    } | changes  # fmt: skip


def test_what_is_typed_becomes_what_it_names(tmp_path):
    asked = request(tmp_path)
    main._read(asked)
    assert asked["allocators"] == ["gruyere", "default", "expandable"]
    assert (asked["name"], ids(asked["gpus"])) == ("train", [gpus.USUAL])
    asked = request(tmp_path, alloc=["torch", "torch"], name="mine", sweep="batch=--batch:1..4")
    main._read(asked)
    assert (asked["allocators"], asked["name"]) == (["default"], "mine")
    assert asked["sweep"].range == (1, 4)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"gpu": ["h99"]}, "--gpu h99: unknown GPU"),
        ({"gpu": ["a100"]}, "a100-40, a100-80"),
        ({"sweep": "batch=8..1"}, "8..1: expected whole numbers, as in 1..64"),
        ({"sweep": "batch=1,2"}, "no {batch}"),
        ({"history": "/dev/null/runs"}, "--history /dev/null/runs: "),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_runs(tmp_path, capsys, changes, reason):
    with pytest.raises(SystemExit) as ended:
        main.main(json.dumps(request(tmp_path, **changes)))
    said = capsys.readouterr()
    assert ended.value.code == main.WRONG_ARGUMENTS == 2
    assert said.out == "" and said.err.startswith("gruyere dryrun: ") and reason in said.err


def test_the_list_is_printed_and_nothing_runs(capsys):
    main.main(json.dumps({"gpu": ["list"]}))
    assert capsys.readouterr().out == gpus.table()


@pytest.mark.parametrize(
    ("package", "what", "request_of", "command"),
    [
        ("gruyere._dryrun", "main", {"gpu": ["list"]}, "dryrun"),
        ("gruyere._bench", "bench", {"list": True}, "bench --torch"),
    ],
)
def test_a_full_disk_is_told_of_and_a_closed_pipe_is_not(package, what, request_of, command):
    line = [sys.executable, "-m", package, what, json.dumps(request_of)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python_loader")}

    def ended(out):
        ran = subprocess.run(line, stdout=out, stderr=subprocess.PIPE, env=environment, text=True)
        return ran.returncode, ran.stderr

    with open("/dev/full", "w") as full:
        code, said = ended(full)
    assert code == 1 and said.startswith(f"gruyere {command}: standard output: No space"), said
    assert said.count("\n") == 1, said
    out, into = os.pipe()
    os.close(out)
    assert ended(into) == (0, "")
    os.close(into)
