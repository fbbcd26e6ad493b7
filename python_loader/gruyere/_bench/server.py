"""The server process of one allocator. It imports torch once and forks for each run of a built-in
program. The child starts with torch imported and without CUDA, like a fresh process, but without
the seconds that the import takes.

Requests are lines of JSON on stdin; answers are lines of JSON on the original stdout. The first
line describes its torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn, Optional

from .._sandbox import kernel
from . import measure
from .measure import COMPLETED, FAILED, OUT_OF_MEMORY, Meter, Result

OLDEST = (2, 4)


def main(text: str) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    setup = json.loads(text)
    allocator: str = setup["allocator"]
    turns = socket.socket(fileno=setup["turns"])
    # Output of libraries goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        torch, facts = _torch()
    except Exception as error:
        print(json.dumps({"failed": str(error)}), file=answers, flush=True)
        sys.exit(1)
    _import_what_torch_puts_off(torch)
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(_forked(torch, allocator, request, turns), file=answers, flush=True)


def _torch() -> tuple[Any, dict[str, Any]]:
    """torch, and facts about it. Raises an error with a message for the user if this torch cannot
    be used."""
    try:
        import torch
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise RuntimeError(f"torch cannot be imported by {sys.executable}: {reason}") from error
    version = str(torch.__version__)
    numbers = [int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")[:2]]
    if tuple(numbers) < OLDEST:
        raise RuntimeError(
            f"torch {version} is too old: install {'.'.join(map(str, OLDEST))} or newer, or "
            "choose another interpreter with --python"
        )
    if torch.version.cuda is None:
        raise RuntimeError(
            f"torch {version} is built without CUDA: install a torch built for CUDA"
        )
    return torch, {
        "torch": version,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "executable": sys.executable,
    }


def _import_what_torch_puts_off(torch: Any) -> None:
    """Import before the first fork what torch imports lazily: an optimiser's first use imports half
    of torch, which would take some seconds of every run."""
    # Some of it checks for a GPU, after which torch refuses CUDA in forked children. So hide the
    # GPU meanwhile.
    shown = torch.cuda._is_compiled
    torch.cuda._is_compiled = lambda: False
    try:
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        optimizer.step()
        optimizer.zero_grad()
        from . import programs  # noqa: F401
    finally:
        torch.cuda._is_compiled = shown


def _forked(torch: Any, allocator: str, request: dict[str, Any], turns: socket.socket) -> str:
    """Run the request in a child. Returns its answer."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        # A server that is ended ends the run too.
        kernel.die_with_parent(signal.SIGKILL)
        os.close(readable)
        code = 1
        try:
            # The child must not read the parent's requests.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with os.fdopen(writable, "w") as answer:
                answer.write(run(torch, allocator, **request, turns=turns).to_json())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            _exit(code)
    os.close(writable)
    return _answer_of(child, readable, request["seconds"])


def _exit(code: int) -> NoReturn:
    """Exit the process by C's exit(), which runs exit handlers and destructors of libraries (they
    close the record and the driver's books). Shutting down the interpreter with all of torch's
    modules would take longer than the run."""
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)
    raise AssertionError("exit() returned")


def _answer_of(child: int, readable: int, seconds: float) -> str:
    """The child's answer if it ended normally; otherwise a result with the reason."""
    text = b""
    deadline = time.monotonic() + seconds
    with os.fdopen(readable, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Result(
                    FAILED, f"took more than {seconds:.0f} s; --timeout allows more"
                ).to_json()
            part = pipe.read(1 << 16)
            if not part:
                break
            text += part
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0 and text:
        return text.decode()
    return Result(FAILED, ended(code)).to_json()


def ended(code: int) -> str:
    """A process's exit code as text. The caller adds the reason from the log."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run(
    torch: Any,
    allocator: str,
    program: str,
    steps: int,
    memory: Optional[int],
    seconds: float,
    turn: int,
    turns: socket.socket,
) -> Result:
    """Run a built-in program from beginning to end, on a device of `memory` bytes. If `turn` is not
    0, each step waits for that number."""
    result = Result(COMPLETED)
    meter = Meter(allocator, memory)
    try:
        if allocator == "gruyere":
            import gruyere

            gruyere.enable()
        if meter.stand_in is not None:
            # What cuDNN's plans need beside their operands is unknown there.
            torch.backends.cudnn.enabled = False
            torch.backends.cuda.enable_cudnn_sdp(False)
        meter.prepare(torch)
        torch.manual_seed(0)
        from .programs import PROGRAMS

        steps_of = PROGRAMS[program](steps)
        try:
            _drive(torch, steps_of, meter, result, turn, turns)
        except Exception as error:
            if not measure.is_out_of_memory(torch, error):
                raise
            result.outcome, result.reason = OUT_OF_MEMORY, measure.first_line(error)
        meter.read(torch, result)
    except Exception as error:
        result.outcome, result.reason = (
            FAILED,
            str(error) if isinstance(error, measure.Unfit) else measure.first_line(error),
        )
    return result


def _drive(
    torch: Any, steps: Iterator[None], meter: Meter, result: Result, turn: int, turns: socket.socket
) -> None:
    while True:
        if turn:
            _await_turn(turn, turns)
        began, worked = time.perf_counter_ns(), time.process_time_ns()
        try:
            next(steps)
        except StopIteration:
            return
        host = time.perf_counter_ns() - began
        worked = time.process_time_ns() - worked
        torch.cuda.synchronize(0)
        result.steps += 1
        if meter.stand_in is not None:
            # Nothing here waits for a device, so processor time is the cost of a step, whatever
            # else the machine runs.
            result.host_ns.append(worked)
        else:
            result.host_ns.append(host)
            result.step_ns.append(time.perf_counter_ns() - began)
            meter.sample(torch)
        if turn:
            turns.send(bytes([turn]))


def _await_turn(turn: int, turns: socket.socket) -> None:
    # Other numbers are left over from an earlier run that died before it read them.
    given = b""
    while given != bytes([turn]):
        given = turns.recv(1)
        if not given:
            raise measure.Unfit("the comparison has ended")
