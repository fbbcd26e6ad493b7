"""Telling the record the process's rank, where no launcher has set RANK and WORLD_SIZE before the
process started: torch.multiprocessing.spawn passes the rank to init_process_group alone, and
Lightning's own launcher sets a part of the variables, or sets them later."""

from __future__ import annotations

import functools
from typing import Any, Callable

from .._native import library


def install(torch: Any) -> None:
    """Follow the creation of the default process group. Called by enable()."""
    if not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized():
        _tell(torch.distributed.group.WORLD)
    groups = torch.distributed.distributed_c10d
    # Whatever creates the group calls it there; init_process_group itself is also known by other
    # names, as in torch.distributed.
    original: Any = getattr(groups, "_new_process_group_helper", None)
    if original is not None:
        groups._new_process_group_helper = _following(original)


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def helper(*arguments: Any, **named: Any) -> Any:
        made = original(*arguments, **named)
        ranks = arguments[2] if len(arguments) > 2 else named.get("global_ranks_in_group")
        # The default group names no ranks: it has all.
        if ranks is not None and len(ranks) == 0:
            _tell(made)
        return made

    return helper


def _tell(made: Any) -> None:
    # MPI tells the rank only by the group, and the arguments have none.
    group = made[0] if isinstance(made, tuple) else made
    try:
        rank, world_size = int(group.rank()), int(group.size())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # A backend of another kind; the record then has no rank, as before.
        return
    library.load().gruyere_announce_rank(rank, world_size)
