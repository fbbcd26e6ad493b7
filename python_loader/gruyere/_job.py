"""The first rank of a job, run without the others (`--ranks`).

Its process groups are torch's "fake" ones, of the job's size, whose collectives exchange nothing:
what a rank allocates for them is the same, and a rank's memory does not depend on what it receives,
as long as no value decides what it does next. Python objects that ranks exchange are this rank's
own, as if all ranks had the same.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import Counter
from types import ModuleType
from typing import Any, Callable, Optional

from ._imports import when_imported
from ._ranks import number

EXCHANGED = "torch.distributed: what the other ranks have is what this rank has"
# The ranks of a node, where the environment has no LOCAL_WORLD_SIZE.
_A_NODE = 8
_SENDING = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list",
)  # fmt: skip


def environment(ranks: Optional[int]) -> dict[str, str]:
    """The variables that torchrun gives the first rank, and the devices of its node; none where the
    program is no rank."""
    if ranks is None:
        return {}
    here = min(ranks, number("LOCAL_WORLD_SIZE") or _A_NODE)
    nodes = -(-ranks // here)
    said = {
        "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0, "ROLE_NAME": "default",
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": nodes,
        "ROLE_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none", "PHANTOM_DEVICES": here,
    }  # fmt: skip
    return {name: str(value) for name, value in said.items()}


def unused(ranks: int) -> str:
    """That the program has no ranks."""
    return (
        f"--ranks {ranks} had no effect: the program made no process group "
        "(torch.distributed.init_process_group)"
    )


def _given(original: Callable[..., Any], call: Callable[[dict[str, Any]], Any]) -> Any:
    """In the place of `original`: `call` with the arguments that were given, by their names."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def calling(*arguments: Any, **options: Any) -> Any:
        return call(signature.bind(*arguments, **options).arguments)

    return calling


class Job:
    def __init__(self, ranks: int, answered: Counter[str]) -> None:
        self.ranks = ranks
        self.answered = answered
        # Whether the program has made a process group.
        self.is_used = False
        # Whether its ranks send to each other, as the stages of a pipeline do.
        self.sends = False
        # The backends that the program asked for, by group; of the first group under None.
        self.asked: dict[Any, str] = {}

    def watch(self) -> None:
        """Install the hooks. Call before torch is imported."""
        when_imported("torch.distributed.distributed_c10d", self._groups)
        when_imported("torch.nn.parallel.distributed", _average)
        when_imported("torch.multiprocessing.spawn", _start)

    def facts(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "is_used": self.is_used, "sends": self.sends}

    def _groups(self, module: ModuleType) -> None:
        of: Any = vars(module)
        original: Callable[..., Any] = of["init_process_group"]
        of["init_process_group"] = _given(original, functools.partial(self._begin, original))
        original = of["new_group"]
        of["new_group"] = _given(original, functools.partial(self._make, original))
        of["get_backend"] = self._naming(of["get_backend"])
        for name in _SENDING:
            if name in of:
                of[name] = self._sending(of[name])
        for name, call in (
            ("all_gather_object", functools.partial(self._gather, "object_list")),
            ("gather_object", functools.partial(self._gather, "object_gather_list")),
            ("broadcast_object_list", self._broadcast), ("scatter_object_list", self._scatter),
        ):  # fmt: skip
            of[name] = _given(of[name], call)

    def _begin(self, original: Callable[..., None], given: dict[str, Any]) -> None:
        # Registers the backend.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        alike = _alike()
        for name, ours in (("world_size", self.ranks), ("rank", 0)):
            if given.get(name, -1) not in (-1, ours):
                raise ValueError(
                    f"init_process_group({name}={given[name]}): --ranks {self.ranks} runs the "
                    f"first of {self.ranks} ranks; take {name} from the environment, or name "
                    "another --ranks"
                )
        self.is_used = True
        self.asked[None] = _backend(given.get("backend"))
        more = {} if alike is None else {"pg_options": alike}
        original(backend="fake", store=FakeStore(), rank=0, world_size=self.ranks, **more)

    def _make(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        asked = given.pop("backend", None)
        # They belong to the backend that was asked for.
        given.pop("pg_options", None)
        given.pop("device_id", None)
        group = original(**given)
        if asked is not None:
            self.asked[group] = _backend(asked)
        return group

    def _naming(self, original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def get_backend(group: Any = None) -> str:
            name = original(group)
            # torch itself asks for what the group can do.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.partition(".")[0] == "torch":
                return name
            return self.asked.get(group, self.asked.get(None, name))

        return get_backend

    def _sending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sending(*arguments: Any, **options: Any) -> Any:
            self.sends = True
            if original.__name__ == "recv_object_list":
                raise RuntimeError(
                    "recv_object_list: --ranks runs the first rank alone, and what another one "
                    "would send is not known"
                )
            return original(*arguments, **options)

        return sending

    def _gather(self, into: str, given: dict[str, Any]) -> None:
        # None where another rank gathers.
        gathered = given.get(into) or []
        self.answered[EXCHANGED] += 1
        for index in range(len(gathered)):
            gathered[index] = copy.deepcopy(given["obj"])

    def _broadcast(self, given: dict[str, Any]) -> None:
        # What another rank would send is not known: what is in the list stays.
        if (given.get("src") or 0) == 0:
            self.answered[EXCHANGED] += 1

    def _scatter(self, given: dict[str, Any]) -> None:
        scattered = given.get("scatter_object_input_list")
        self.answered[EXCHANGED] += 1
        # None where another rank scatters.
        if scattered:
            given["scatter_object_output_list"][0] = copy.deepcopy(scattered[0])


def _alike() -> Any:
    """The options of a group whose ranks all have the same; None before torch 2.15."""
    from torch._C import _distributed_c10d as c10d

    options = getattr(c10d.FakeProcessGroup, "Options", None)
    if not hasattr(options, "simulate_uniform_ranks"):
        return None
    found = options()
    found.simulate_uniform_ranks = True
    return found


def _start(module: ModuleType) -> None:
    """torch.multiprocessing.spawn: of the ranks that it would start, the first runs here."""
    of: Any = vars(module)
    original = of["start_processes"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def start_processes(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        given = bound.arguments
        if given["nprocs"] == 1 or not given["join"]:
            return original(*arguments, **options)
        return given["fn"](0, *given["args"])

    of["start_processes"] = start_processes


def _average(module: ModuleType) -> None:
    """DistributedDataParallel: its buckets are what their average is. Before torch 2.15 a fake
    group's work has no result, which DistributedDataParallel would not take."""
    of: Any = module.DistributedDataParallel
    original = of.__init__

    def average(_: Any, bucket: Any) -> Any:
        import torch

        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # torch would take no other than its own classes.
    average.__annotations__ = {}

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if _alike() is None:
            self.register_comm_hook(None, average)
            # There can be one only, and the program's own would wait for a result.
            self.register_comm_hook = self._register_builtin_comm_hook = lambda *_, **__: None

    of.__init__ = init


def _backend(asked: Optional[str]) -> str:
    """The name that `get_backend` gives a program that asked for this backend."""
    # "cpu:gloo,cuda:nccl" and none are both.
    name = "" if asked is None else str(asked).lower()
    return "nccl" if not name or ":" in name else name
