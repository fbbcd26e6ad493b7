"""What the sandbox keeps, beside `test_sandbox.py`: from programs that put links where the sandbox
itself writes and removes, on kernels with an old Landlock, and outside the files."""
# ruff: noqa: F401, F811 (fixtures are imported)

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
from test_sandbox import MIB, answer, files, kit, sandboxed, user, way

from gruyere._sandbox import kernel
from gruyere._sandbox.folders import remove


def test_what_is_removed_at_the_end_leads_to_no_file_of_the_user_s(way, user, files):
    code = f"""
    import os
    os.makedirs("cache/snap")
    for number, name in enumerate(("beside.bin", "home/notes.txt", "home")):
        os.symlink(os.path.join({str(files.parent.parent)!r}, name), f"cache/snap/{{number}}")
    os.chmod("cache/snap", 0o555)
    os.chmod("cache", 0)
    os.chmod("data", 0o555)
    os.chmod("runs/old", 0o500)
    """
    root = files.parent.parent
    names = [root / name for name in ("beside.bin", "home", "home/notes.txt")]
    names += [files / "data" / "deep", files / "large.bin", files / "runs" / "old" / "model.pt"]
    before = [stat.S_IMODE(name.lstat().st_mode) for name in names]
    told = answer(sandboxed(way, user, files, code), way)
    assert told["code"] == 0, told["said"] + str(told)
    assert [stat.S_IMODE(name.lstat().st_mode) for name in names] == before


def test_a_folder_is_removed_however_deep_it_is(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o400)
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1_500):
        os.symlink(kept, "link", dir_fd=here)
        os.mkdir("inner", dir_fd=here)
        below = os.open("inner", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove(top)
    assert os.listdir(tmp_path) == ["kept"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o400 and kept.read_text() == "kept"


def test_the_sandbox_writes_through_no_link_of_the_program_s(user, files):
    # What the sandbox wrote beside a file that it copied had a name that the program could guess.
    code = f"""
    import os, threading
    beside = {str(files.parent.parent / "beside.bin")!r}
    for name in ("large.bin", "data/deep/x.bin", "data/deep"):
        os.symlink(beside, name + ".gruyere-part")
    with open("large.bin", "r+b") as file:
        file.write(b"EVIL")
    with open("data/deep/x.bin", "r+b") as file:
        file.write(b"EVIL")
    # A folder that becomes a link to another one while files in it are copied.
    os.makedirs("swapped/real")
    os.symlink(os.path.dirname(beside), "swapped/link")
    os.rename("swapped/real", "swapped/here")
    ended = False

    def swap():
        while not ended:
            os.rename("swapped/here", "swapped/real")
            os.rename("swapped/link", "swapped/here")
            os.rename("swapped/here", "swapped/link")
            os.rename("swapped/real", "swapped/here")

    thread = threading.Thread(target=swap)
    thread.start()
    for _ in range(200):
        try:
            open("swapped/here/beside.bin", "r+b").write(b"EVIL")
        except OSError:
            pass
    ended = True
    thread.join()
    """
    beside = files.parent.parent / "beside.bin"
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert beside.read_bytes() == b"B" * MIB and os.listdir(files.parent.parent / "home")
    assert (files / "large.bin").read_bytes() == b"L" * MIB


def test_two_names_of_a_file_stay_one_file(user, files):
    code = """
    import os
    os.link("large.bin", "hard.bin")
    os.link("absolute", "absolute2")
    assert os.path.islink("absolute2")
    os.link("data/deep/x.bin", "runs/x.bin", follow_symlinks=True)
    for one, other in (("large.bin", "hard.bin"), ("data/deep/x.bin", "runs/x.bin")):
        assert os.path.samefile(one, other)
        for number, name in enumerate((one, other, one)):
            with open(name, "r+b") as file:
                file.write(str(number).encode())
            assert open(one, "rb").read(1) == open(other, "rb").read(1) == str(number).encode()
        assert os.path.samefile(one, other) and os.stat(one).st_nlink == 2
    # A link of the program's own, where one of the sandbox's was.
    os.remove("small.txt")
    os.symlink("runs/log.txt", "small.txt")
    open("small.txt", "w").write("through")
    assert os.path.islink("small.txt") and open("runs/log.txt").read() == "through"
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert (files / "large.bin").read_bytes() == b"L" * MIB


def old_landlock(tmp_path, version):
    """A package for which this kernel's Landlock has an earlier version."""
    kit = tmp_path / "old"
    shutil.copytree(sandboxed.program.parents[3], kit)
    kernel = kit / "python_loader" / "gruyere" / "_sandbox" / "kernel.py"
    text = kernel.read_text()
    asks = "return _syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))"
    assert asks in text
    kernel.write_text(text.replace(asks, f"return {version}"))
    for path in (kit, *kit.rglob("*")):
        path.chmod(0o755)
    return kit / "tests" / "pytorch" / "programs" / "sandboxed.py"


@pytest.mark.parametrize("version", [1, 2])
def test_an_old_landlock_lets_no_file_be_emptied(version, user, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sandboxed, "program", old_landlock(tmp_path, version))
    secret = files / "secret.bin"
    secret.write_bytes(b"S" * MIB)
    # It can be written to and not read, so there is no copy of it.
    secret.chmod(0o200)
    if user == "nobody":
        os.chown(secret, 65534, 65534)
    code = f"""
    import os
    beside = {str(files.parent.parent / "beside.bin")!r}
    os.chdir("runs")
    names = [beside, {str(files / "large.bin")!r}]
    if os.geteuid():
        names.append("../secret.bin")
    for name in names:
        for change in (
            lambda: os.truncate(name, 0),
            lambda: os.truncate(name, 5),
            lambda: os.open(name, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(name, os.O_WRONLY | os.O_TRUNC),
        ):
            try:
                change()
            except PermissionError:
                continue
            raise SystemExit(f"{{name}} is changed")
    # Its own are emptied as before.
    os.truncate("../large.bin", 5)
    os.close(os.open("log.txt", os.O_RDONLY | os.O_TRUNC))
    assert os.stat("../large.bin").st_size == 5 and os.stat("log.txt").st_size == 0
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert (files.parent.parent / "beside.bin").read_bytes() == b"B" * MIB
    assert (files / "large.bin").read_bytes() == b"L" * MIB
    assert secret.stat().st_size == MIB
    assert {"kind": "write", "name": str(files.parent.parent / "beside.bin")} in told["refused"]


def test_the_flags_of_a_file_stay(user, files):
    code = f"""
    import errno, fcntl, os
    set_flags, set_attributes, no_dump = 0x40086602, 0x401C5820, 0x40
    for name in ({str(files.parent.parent / "beside.bin")!r}, "large.bin"):
        handle = os.open(name, os.O_RDONLY)
        for request in (set_flags, set_attributes):
            try:
                fcntl.ioctl(handle, request, no_dump.to_bytes(8, "little").ljust(28, b"\\0"))
            except OSError as error:
                assert error.errno == errno.EPERM, error
            else:
                raise SystemExit("they are set")
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)


def test_no_way_of_sending_leaves_the_machine(user, files, tmp_path):
    outer = tmp_path / "socket"
    code = f"""
    import array, ctypes, errno, os, socket, struct
    away = ("192.0.2.1", 53)

    def refused(number, call):
        try:
            call()
        except OSError as error:
            assert error.errno == number, error
        else:
            raise SystemExit("it is let through")

    def made(family, kind):
        return socket.socket(family, kind)

    udp = made(socket.AF_INET, socket.SOCK_DGRAM)
    refused(errno.ENETUNREACH, lambda: udp.sendmsg([b"x"], [], 0, away))
    six = made(socket.AF_INET6, socket.SOCK_DGRAM)
    refused(errno.ENETUNREACH, lambda: six.sendmsg([b"x"], [], 0, ("2001:db8::1", 53)))
    refused(errno.ENETUNREACH, lambda: six.sendto(b"x", ("::ffff:192.0.2.1", 53)))
    for send in (
        lambda: made(socket.AF_INET, socket.SOCK_STREAM).sendmsg(
            [b"x"], [], socket.MSG_FASTOPEN, away),
        lambda: made(socket.AF_INET, socket.SOCK_STREAM).sendto(b"x", socket.MSG_FASTOPEN, away),
    ):
        refused(errno.EOPNOTSUPP, send)

    # sendmmsg; and an address without a family, which is sent to as one of IPv4.
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(b"x")
    vector = struct.pack("=QQ", ctypes.addressof(buffer), 1)
    for family in (socket.AF_INET, socket.AF_UNSPEC):
        address = struct.pack("=H", family) + struct.pack("!H4s8x", 53, bytes([192, 0, 2, 1]))
        parts = [ctypes.create_string_buffer(part) for part in (address, vector)]
        near = ctypes.create_string_buffer(
            struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 53, bytes([127, 0, 0, 1])))

        def message(name):
            head = struct.pack("=Qi4xQQQQi4x", ctypes.addressof(name), 16,
                               ctypes.addressof(parts[1]), 1, 0, 0, 0)
            assert len(head) == 56
            return head

        both = [message(name) + bytes(8) for name in (near, parts[0])]
        many = ctypes.create_string_buffer(b"".join(both))
        for result in (
            libc.sendmmsg(udp.fileno(), many, 2, 0),
            libc.sendto(udp.fileno(), buffer, 1, 0, parts[0], 16),
            libc.sendmsg(udp.fileno(), ctypes.create_string_buffer(message(parts[0])), 0),
        ):
            assert result == -1 and ctypes.get_errno() == errno.ENETUNREACH, result

    # What is no address of memory is an error of the program's.
    for nowhere in (ctypes.c_void_p(2**64 - 1), ctypes.c_void_p(8)):
        for result in (libc.sendmsg(udp.fileno(), nowhere, 0), libc.chmod(nowhere, 0),
                       libc.connect(udp.fileno(), nowhere, 16)):
            assert result == -1 and ctypes.get_errno() == errno.EFAULT, ctypes.get_errno()

    # Whatever it does later, the socket is bound to loopback.
    refused(errno.EPERM, lambda: udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b""))
    refused(errno.EPERM, lambda: udp.setsockopt(socket.SOL_SOCKET, 62, 0))
    assert udp.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b"lo\\0"
    refused(errno.EAFNOSUPPORT, lambda: made(socket.AF_PACKET, socket.SOCK_DGRAM))
    refused(errno.EAFNOSUPPORT, lambda: made(40, socket.SOCK_STREAM))
    refused(errno.EPERM, lambda: made(socket.AF_INET, socket.SOCK_RAW))

    def unix(name, kind=socket.SOCK_STREAM):
        with made(socket.AF_UNIX, kind) as client:
            client.connect(name)

    outer = {str(outer)!r}
    os.symlink(outer, "away")
    os.chdir("runs")
    held = os.open(outer, os.O_PATH)
    for name in (outer, "../away", f"/proc/self/fd/{{held}}", f"/proc//self/fd/{{held}}"):
        refused(errno.EACCES, lambda: unix(name))
    refused(errno.EACCES, lambda: made(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", outer))
    refused(errno.EACCES,
            lambda: made(socket.AF_UNIX, socket.SOCK_DGRAM).sendmsg([b"x"], [], 0, outer))
    refused(errno.ENOENT, lambda: unix(outer + "-not-there"))
    if {new_kernel()}:
        refused(errno.EPERM, lambda: unix("\\0" + outer))
    """
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(outer))
    server.listen()
    outer.chmod(0o777)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + str(outer))
    abstract.listen()
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert {"kind": "network", "name": "192.0.2.1:53"} in told["refused"]
    assert {"kind": "socket", "name": str(outer)} in told["refused"]


def new_kernel():
    """Whether abstract sockets of others can be refused."""
    return kernel.landlock_version() >= 6


def test_what_a_program_connects_within_itself_goes_on_working(way, user, files):
    code = """
    import multiprocessing, os, socket, struct, threading
    from multiprocessing import shared_memory

    def through(server, client, address):
        server.bind(address)
        server.listen()
        client.connect(server.getsockname())
        with server.accept()[0] as there:
            if server.family == socket.AF_UNIX:
                socket.send_fds(client, [b"x"], [0])
            else:
                client.send(b"x")
            assert there.recv(1) == b"x"

    def twice(number):
        return number * 2

    def fill(name, lock, values):
        with lock:
            block = shared_memory.SharedMemory(name)
            block.buf[0] = 7
            block.close()
            values.append(os.getpid())

    if __name__ == "__main__":
        for family, address in (
            (socket.AF_INET, ("", 0)), (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_INET6, ("::1", 0)), (socket.AF_UNIX, "\\0ours"),
            (socket.AF_UNIX, "here.socket"),
        ):
            with socket.socket(family) as server, socket.socket(family) as client:
                through(server, client, address)
        one, two = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
        with one, two:
            one.bind(("127.0.0.1", 0))
            two.sendto(b"to", one.getsockname())
            two.sendmsg([b"message"], [], 0, one.getsockname())
            two.connect(one.getsockname())
            two.sendmsg([b"connected"])
            assert [one.recv(9) for _ in range(3)] == [b"to", b"message", b"connected"]
        one, two = socket.socketpair()
        socket.send_fds(one, [b"x"], [0])
        os.close(socket.recv_fds(two, 1, 1)[1][0])
        assert ("lo" in [name for _, name in socket.if_nameindex()])
        assert socket.getaddrinfo("localhost", 80)
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            with context.Pool(2) as pool:
                assert pool.map(twice, range(4)) == [0, 2, 4, 6]
            with context.Manager() as manager:
                values = manager.list()
                block = shared_memory.SharedMemory(create=True, size=4096)
                lock = context.Lock()
                child = context.Process(target=fill, args=(block.name, lock, values))
                child.start()
                child.join()
                assert child.exitcode == 0 and block.buf[0] == 7 and list(values) == [child.pid]
                block.close()
                block.unlink()
    """
    told = answer(sandboxed(way, user, files, code), way)
    assert told["code"] == 0, told["said"] + str(told)
    assert told["refused"] == []


@pytest.fixture
def shared():
    """What is in the machine's shared memory before the run, of whoever runs it."""
    name = f"/dev/shm/gruyere-test-{os.getpid()}"
    yield name
    for path in (f"{name}-file", f"{name}-new", f"{name}-moved"):
        if os.path.exists(path):
            os.unlink(path)
    shutil.rmtree(f"{name}-folder", ignore_errors=True)


def test_shared_memory_of_others_stays_and_that_of_the_run_goes(user, files, shared):
    owner = 65534 if user == "nobody" else 0
    os.mkdir(f"{shared}-folder")
    for path in (f"{shared}-file", f"{shared}-folder/inner"):
        with open(path, "w") as file:
            file.write("other's")
    for path in (f"{shared}-file", f"{shared}-folder", f"{shared}-folder/inner"):
        os.chown(path, owner, owner)
    before = describe_shared(shared)
    code = f"""
    import ctypes, errno, os, shutil, stat, tempfile
    from multiprocessing import Lock, shared_memory
    name = {shared!r}
    os.symlink(name + "-file", "led")
    for change in (
        lambda: os.unlink(name + "-file"),
        lambda: os.rename(name + "-file", name + "-moved"),
        lambda: os.link(name + "-file", name + "-moved"),
        lambda: open(name + "-file", "r+"),
        lambda: open(name + "-file", "w"),
        lambda: open("led", "a"),
        lambda: os.truncate(name + "-file", 0),
        lambda: os.chmod(name + "-file", 0o600),
        lambda: os.utime(name + "-file", (1, 1)),
        lambda: os.rmdir(name + "-folder"),
        lambda: os.unlink(name + "-folder/inner"),
        lambda: os.replace("small.txt", name + "-file"),
        lambda: os.symlink("/tmp", name + "-link"),
        lambda: os.mkfifo(name + "-pipe"),
        lambda: os.mknod(name + "-node"),
        lambda: os.chmod("/dev/null", 0o666),
    ):
        try:
            change()
        except PermissionError:
            continue
        raise SystemExit("it is changed")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mq_open(b"/gruyere-test", os.O_CREAT | os.O_RDWR, 0o600, None) == -1
    try:
        open(name + "-new", "x").close()
        open(name + "-new", "x")
    except FileExistsError:
        pass
    try:
        open(name + "-none", "r+")
    except FileNotFoundError:
        pass
    # One without a name could get a name that nobody would know of.
    try:
        os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP, error
    else:
        raise SystemExit("it is made")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(b"x")
    os.umask(0o027)
    # What it makes is its own.
    os.unlink(name + "-new")
    handle = os.open(name + "-new", os.O_CREAT | os.O_RDWR, 0o666)
    assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o640
    assert not os.get_inheritable(handle)
    os.fchmod(handle, 0o600)
    os.write(handle, b"ours")
    os.rename(name + "-new", name + "-moved")
    assert open(name + "-moved", "r+").read() == "ours"
    os.makedirs(name + "-ours/inner", exist_ok=True)
    open(name + "-ours/inner/file", "w").write("x")
    assert stat.S_IMODE(os.stat(name + "-ours").st_mode) == 0o750
    shutil.rmtree(name + "-ours")
    os.makedirs(name + "-left/inner")
    open(name + "-left/inner/file", "w").write("x")
    open(name + "-folder/left", "w").write("x")
    with Lock():
        block = shared_memory.SharedMemory(create=True, size=1 << 20)
        again = shared_memory.SharedMemory(block.name)
        block.buf[:4] = b"here"
        assert bytes(again.buf[:4]) == b"here"
        again.close()
        block.close()
    print(block.name, flush=True)
    os._exit(0)
    """
    told = answer(sandboxed("landlock", user, files, code), "landlock")
    assert told["code"] == 0, told["said"] + str(told)
    assert describe_shared(shared) == before
    assert not os.path.exists(f"/dev/shm/{told['said'].strip()}")
    assert {"kind": "write", "name": f"{shared}-file"} in told["refused"]


def describe_shared(name):
    found = {}
    for path in sorted(Path("/dev/shm").glob(f"{os.path.basename(name)}-*")):
        inner = sorted(path.iterdir()) if path.is_dir() else []
        for one in (path, *inner):
            told = one.lstat()
            content = one.read_bytes() if one.is_file() else None
            found[str(one)] = (told.st_mode, told.st_uid, told.st_nlink, content)
    return found
