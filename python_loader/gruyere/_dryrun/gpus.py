"""The GPUs of a dry run: the stand-in's properties for each. gpus.json has them.

Memory is the driver's total (`cuMemGetInfo`, torch's `total_memory` and "total capacity"): less
than the advertised size, and slightly different from driver to driver. Each figure was printed on
such a GPU, at the given address; of several, the table has the smallest. A figure such as
"79.10 GiB" stands for the least value that prints so.

No source publishes the memory of a CUDA context. It is derived from torch's out-of-memory
messages: the process's memory in use, minus PyTorch's allocated and reserved memory. docs/gpus.md
has the messages and the rule.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from .._errors import GruyereError

Gpu = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30
# The default GPU.
USUAL = "h100-80"
LIST = "list"
# `context` in gpus.json: the largest in messages of two programs or more on this GPU, or a figure
# from messages on similar GPUs.
SEEN, LIKE = "seen", "like"
_SOURCES = {
    SEEN: "the largest in torch's out-of-memory messages on this GPU",
    LIKE: "assumed: torch's out-of-memory messages on similar GPUs (--context)",
}


@functools.lru_cache(maxsize=None)
def rows() -> tuple[dict[str, Any], ...]:
    """The rows of gpus.json: smallest first within each family, in their usual order."""
    return tuple(json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8")))


def known() -> list[Gpu]:
    """All GPUs."""
    return [_gpu(row) for row in rows()]


def _gpu(row: dict[str, Any]) -> Gpu:
    return {
        **{key: row[key] for key in ("id", "name", "capability", "multiprocessors")},
        "memory": row["memory_mib"] * MIB,
        "memory_source": row["source"],
        "context": row["context_mib"] * MIB,
        "context_known": row["context"] == SEEN,
        "context_source": _SOURCES[row["context"]],
    }


def find(word: str) -> Gpu:
    """The GPU named `word`: an id, or the model alone if it has a single size. Raises GruyereError,
    with the choices, if no GPU or several match."""
    wanted = word.lower()

    def fits(gpu: Gpu) -> bool:
        model: str = gpu["id"].rpartition("-")[0]
        return wanted in (gpu["id"], model) or model == f"rtx{wanted}"

    found = [gpu for gpu in known() if fits(gpu)]
    if not found:
        names = textwrap.fill(
            _ids(known()), initial_indent="  ", subsequent_indent="  ", width=80,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        raise GruyereError(f"--gpu {word}: unknown GPU; use --gb N or one of these:\n{names}")
    if len(found) > 1:
        raise GruyereError(f"--gpu {word}: sold in several sizes; name one of {_ids(found)}")
    return found[0]


def of_size(gib: float) -> Gpu:
    """A GPU of this many GiB, otherwise like the default."""
    return {
        **find(USUAL),
        "id": f"{int(gib) if gib.is_integer() else gib}gb",
        "memory": int(gib * GIB) // MIB * MIB,
        "memory_source": "--gb",
        "context_known": False,
        "context_source": "assumed, as for an H100 (--context)",
    }


def chosen(names: list[str], sizes: list[float], context: Optional[int]) -> list[Gpu]:
    """The GPUs to run on, for --gpu, --gb and --context. Raises GruyereError."""
    found = [find(name) for name in names] + [of_size(gib) for gib in sizes] or [find(USUAL)]
    if context is not None:
        for gpu in found:
            if context >= gpu["memory"]:
                raise GruyereError(
                    f"--context {context / GIB:.2f} GiB: {gpu['id']} has {gpu['memory'] / GIB:.2f} "
                    "GiB, which leaves the program none"
                )
            gpu.update(context=context, context_known=True, context_source="--context")
    # `h100,h100-80` names a single GPU.
    return list({gpu["id"]: gpu for gpu in found}.values())


def others(names: list[str], sizes: list[float]) -> list[Gpu]:
    """The GPUs predicted from the books alone: none if the user has named any."""
    return [] if names or sizes else [gpu for gpu in known() if gpu["id"] != USUAL]


def table() -> str:
    """The table, for `--gpu list`."""
    text = f"{'gpu':<17} {'memory':>10} {'context':>9} {'SMs':>4} {'capability':>10}  name\n"
    for gpu in known():
        text += (
            f"{gpu['id']:<17} {gpu['memory'] / GIB:>6.2f} GiB {gpu['context'] // MIB:>4} MiB"
            f"{' ' if gpu['context_known'] else '?'} {gpu['multiprocessors']:>3} "
            f"{gpu['capability']:>10}  {gpu['name']}\n"
        )
    return text + (
        "Memory: the driver's total. Context: from torch's out-of-memory messages; ?: from those "
        "on\nsimilar GPUs (--context sets it). Sources of all numbers: docs/gpus.md.\n"
    )


def _ids(gpus: Iterable[Gpu]) -> str:
    return ", ".join(gpu["id"] for gpu in gpus)
