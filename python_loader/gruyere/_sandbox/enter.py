"""The process between us and the program: `main(request)` starts the program in its sandbox and
exits as the program did.

It is the parent of the program, so that no process of the program outlives the run: it adopts
orphaned processes and kills them. If our process is killed, the kernel tells it to end them; if it
is killed itself, the kernel kills the program.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NoReturn, Optional

from . import filter, kernel, landlock, overlay
from .guard import Guard, Refusals
from .links import Mirror

# The ways of a Box.
OVERLAY, LANDLOCK, NONE = "overlay", "landlock", "none"
# Exit code: the sandbox could not be made; the reason is on stderr.
NO_SANDBOX = 125


def main(file: str) -> NoReturn:
    """Run the request in `file` (JSON), which is removed."""
    with open(file) as opened:
        request = json.load(opened)
    os.unlink(file)
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != request["parent"]:
        sys.exit(NO_SANDBOX)
    # Until it can end the program.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    kernel.adopt_orphans()
    ours, theirs = socket.socketpair()
    mirror: Optional[Mirror] = None
    if request["way"] == LANDLOCK:
        mirror = Mirror(
            request["mirror"], request["hidden"], request["writable"], request["room"]
        )
        mirror.make(request["cwd"], request["homes"])
    identities = overlay.identities() if request["way"] == OVERLAY else None
    child = os.fork()
    if child == 0:
        ours.close()
        _become(request, theirs, identities is not None)

    def end(*_: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    # SIGTERM ends the program; its other processes are killed below.
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    theirs.close()
    listener = _help(request, ours, child, identities)
    guard = None
    if listener is not None:
        assert mirror is not None
        writable = [*request["writable"], request["mirror"]]
        guard = Guard(mirror, writable, Refusals(request["refusals"]))
    status = _watch(child, listener, guard)
    # The program has ended, and its number may be another's soon.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_the_rest()
    if guard is not None:
        guard.shared.clear()
    _end_as(status)


# These run in the program's process, before the exec.


def _become(request: dict[str, Any], helper: socket.socket, privileged: bool) -> NoReturn:
    code = NO_SANDBOX
    try:
        kernel.die_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        for lock in request["locks"]:
            os.close(lock)
        limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        # The kernel would write a core file outside the sandbox.
        resource.setrlimit(resource.RLIMIT_CORE, (0, limit))
        cwd = request["cwd"]
        if request["way"] == OVERLAY:
            _overlaid(request, helper, privileged)
        elif request["way"] == LANDLOCK:
            cwd = request["mirror"] + cwd
            _restricted(request, helper)
        os.chdir(cwd)
        helper.close()
        # Again: a change of identity may have cleared it.
        kernel.die_with_parent(signal.SIGKILL)
        environment = request["environment"]
        os.execvpe(request["command"][0], request["command"], environment)
    except FileNotFoundError as error:
        code = 127
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    except OSError as error:
        print(f"the sandbox could not be made: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _overlaid(request: dict[str, Any], helper: socket.socket, privileged: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    overlay.leave(request["network"])
    if privileged:
        helper.send(b"m")
        if helper.recv(1) != b"m":
            raise OSError("users can't be mapped into it")
    else:
        overlay.map_self(uid, gid)
    os.chdir(request["layers"])
    homes = [request["cwd"], *request["homes"]]
    temporary = [request["environment"].get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]
    mounted = overlay.Overlay(
        request["layers"], request["hidden"], request["shown"], request["room"], request["cwd"],
        [] if privileged else homes,
    )  # fmt: skip
    mounted.cover(request["writable"], request["network"], [*homes, *temporary])
    kernel.forbid_new_privileges()
    # Root would keep the power to remove the overlays.
    kernel.drop_from_bounding_set(kernel.CAP_SYS_ADMIN)


def _restricted(request: dict[str, Any], helper: socket.socket) -> None:
    kernel.forbid_new_privileges()
    landlock.restrict([*request["writable"], request["mirror"]], request["network"])
    listeners: list[int] = []
    installed = threading.Event()

    def send() -> None:
        installed.wait()
        socket.send_fds(helper, [b"l"], listeners)

    # In a thread of its own, which the filter does not cover: it passes messages to the guard, who
    # has no listener yet.
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    listeners.append(kernel.install_filter(filter.program(network=not request["network"])))
    installed.set()
    sender.join()
    os.close(listeners[0])


# These run in our process.


def _help(
    request: dict[str, Any], channel: socket.socket, child: int,
    identities: Optional[tuple[str, str]],
) -> Optional[int]:  # fmt: skip
    """Do what the child cannot do itself. Returns the descriptor for its system calls, or None."""
    try:
        if request["way"] == LANDLOCK:
            told, handles, _, _ = socket.recv_fds(channel, 1, 1)
            return handles[0] if told else None
        if identities is not None and channel.recv(1):
            for kind, text in zip(("uid_map", "gid_map"), identities):
                overlay.write_map(child, kind, text)
            channel.send(b"m")
    except OSError as error:
        # Closing the channel makes the child fail and report it.
        print(f"the sandbox could not be made: {error}", file=sys.stderr)
    finally:
        channel.close()
    return None


def _watch(child: int, listener: Optional[int], guard: Optional[Guard]) -> int:
    """Serve the program's calls until it has ended. Returns its status."""
    if listener is None or guard is None:
        return os.waitpid(child, 0)[1]
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.register(listener, select.POLLIN)
    while True:
        ready = dict(waiting.poll())
        if ready.get(listener, 0) & select.POLLIN:
            try:
                call = kernel.Call(listener)
            except OSError:
                continue
            guard.answer(call)
        elif ended in ready:
            return os.waitpid(child, 0)[1]


def _end_the_rest() -> None:
    """Kill the processes that the program has left behind, which are our children now."""
    me = os.getpid()
    # Each round kills one generation; its children then become ours.
    for _ in range(1000):
        try:
            with open(f"/proc/{me}/task/{me}/children") as file:
                left = [int(pid) for pid in file.read().split()]
        except OSError:
            return
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except OSError:
                continue


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    sys.exit(code)
