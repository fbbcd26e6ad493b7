"""CUDA tensors that processes share (torch.multiprocessing), through the native door. The stand-in
keeps contents here, and two processes that map one file see each other's bytes, as on a GPU."""

import pytest

CONTENTS = {"PHANTOM_CONTENTS": "handles", "PHANTOM_MEMORY": "1GiB"}

# How a program begins: the functions are the children's too, which import it anew.
PROCESSES = """
import json, os, sys
import torch, torch.multiprocessing as mp
from torch.multiprocessing.reductions import reduce_tensor
context = mp.get_context("spawn")
def counted(numbers, start=0.0):
    return torch.arange(numbers, dtype=torch.float64) + start
def ends(tensor):
    tensor = tensor.cpu().flatten()
    return [tensor[0].item(), tensor[-1].item()]
def refused(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{function} was not refused")
def take(queue):
    return queue.get(timeout=60)
def begin(function, *arguments):
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process
"""


@pytest.mark.parametrize("conf", ["", "slack:0"])
def test_a_process_reads_and_writes_tensors_of_another(installed, conf):
    """Small ones that share a slab, and one of 60 chunks (slack:0 makes each a page)."""
    ran = installed.code(PROCESSES + """
SIZES = [7, 3000, 1 << 19, 3_000_000, 15 << 20]
def receiver(tensors, back):
    for at in range(len(SIZES)):
        got = take(tensors)
        back.put((got.is_cuda, got.numel(), ends(got)))
        got.copy_(counted(got.numel(), -5.0))
        torch.cuda.synchronize()
        back.put("written")
        del got
    # What is a view here is a view there.
    whole, part = take(tensors)
    assert part.data_ptr() == whole.data_ptr() + 800 and not torch.cuda.memory_allocated()
    back.put(ends(part))
    import gruyere
    back.put(gruyere.is_enabled())
if __name__ == "__main__":
    tensors, back = context.Queue(), context.Queue()
    process = begin(receiver, tensors, back)
    kept = []
    for size in SIZES:
        block = counted(size, 3.0).cuda()
        tensors.put(block)
        assert take(back) == (True, size, [3.0, size + 2.0])
        assert take(back) == "written"
        assert ends(block) == [-5.0, size - 6.0], ends(block)
        kept.append(block)
    whole = counted(1000).cuda()
    tensors.put((whole, whole[100:]))
    assert take(back) == [100.0, 999.0] and take(back)
    process.join()
    assert process.exitcode == 0
    # Nobody has them any more.
    del kept, block, whole
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
""", "", GRUYERE_ENABLE="1", GRUYERE_CONF=conf, **CONTENTS)
    ran.check()


def test_weights_go_to_a_server_that_is_no_child_again_and_again(installed):
    """As trainers of reinforcement learning hand them to the process that generates: handles from
    reduce_tensor, between two processes of one parent."""
    ran = installed.code(PROCESSES + """
ROUNDS, WEIGHTS = 3, 60
def trainer(handles, done):
    weights = [counted(1000 + 40_000 * at).cuda() for at in range(WEIGHTS)]
    for turn in range(ROUNDS):
        for at, weight in enumerate(weights):
            weight.copy_(counted(weight.numel(), turn + at))
        torch.cuda.synchronize()
        handles.put([reduce_tensor(weight) for weight in weights])
        assert take(done) == turn
    del weights, weight
    torch.cuda.ipc_collect()
    done.put(torch.cuda.memory_allocated())
    handles.put(None)
def server(handles, done):
    own = [counted(1000 + 40_000 * at).cuda() for at in range(WEIGHTS)]
    held = torch.cuda.memory_reserved()
    for turn in range(ROUNDS):
        for at, (rebuild, arguments) in enumerate(take(handles)):
            # The device as this process counts it.
            arguments = list(arguments)
            arguments[6] = 0
            own[at].copy_(rebuild(*arguments))
        torch.cuda.synchronize()
        for at, weight in enumerate(own):
            assert ends(weight) == [turn + at, turn + at + weight.numel() - 1.0], (turn, at)
        assert torch.cuda.memory_reserved() == held, "what others have was taken"
        done.put(turn)
    assert take(handles) is None
if __name__ == "__main__":
    handles, done = context.Queue(), context.Queue()
    processes = [begin(trainer, handles, done), begin(server, handles, done)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert take(done) == 0, "the trainer's weights were not freed"
""", "", GRUYERE_ENABLE="1", **CONTENTS)
    ran.check()


def test_what_cannot_be_opened_says_why(installed):
    ran = installed.code(PROCESSES + """
def without_gruyere(handles, said):
    rebuild, arguments = take(handles)
    said.put(refused(rebuild, *arguments))
def sender(handles):
    block = counted(3_000_000).cuda()
    handles.put(reduce_tensor(block))
    take(handles)
    os._exit(0)
if __name__ == "__main__":
    handles = context.Queue()
    process = begin(sender, handles)
    rebuild, arguments = take(handles)
    handles.put(None)
    process.join()
    said = refused(rebuild, *arguments)
    assert "its sender has ended" in said, said
    # Another torch's: expandable segments; a later version of ours; nothing known.
    for handle, why in [
        (b"\\x02e" + bytes(20), "expandable_segments:True"),
        (b"gruyere\\x63" + bytes(40), "another version of Gruy"),
        (bytes(30), "unknown kind"),
    ]:
        said = refused(rebuild, *[handle if at == 7 else kept for at, kept in enumerate(arguments)])
        assert why in said, said
    assert ends(counted(5).cuda()) == [0.0, 4.0]
    # A receiver with torch's own allocator takes it for a later torch's, and says so.
    os.environ["GRUYERE_ENABLE"] = "0"
    said = context.Queue()
    process = begin(without_gruyere, handles, said)
    block = counted(5).cuda()
    handles.put(reduce_tensor(block))
    assert "future version of torch" in take(said)
    process.join()
""", "", GRUYERE_ENABLE="1", **CONTENTS)
    ran.check()


def test_plain_allocations_go_to_and_come_from_processes_without_gruyere(installed):
    """The stand-in has no contents for them: that they are opened, freed and closed is checked."""
    ran = installed.code(PROCESSES + """
def other(tensors, back):
    import gruyere
    assert not gruyere.is_enabled()
    got = take(tensors)
    back.put((got.is_cuda, got.numel()))
    del got
    take(tensors)
    back.put(torch.ones(77, device="cuda"))
    take(tensors)
if __name__ == "__main__":
    tensors, back = context.Queue(), context.Queue()
    os.environ["GRUYERE_ENABLE"] = "0"
    process = begin(other, tensors, back)
    block = counted(5000).cuda()
    tensors.put(block)
    assert take(back) == (True, 5000)
    tensors.put(None)
    got = take(back)
    assert got.is_cuda and got.numel() == 77
    del got
    tensors.put(None)
    process.join()
    assert process.exitcode == 0
""", "", GRUYERE_ENABLE="1", GRUYERE_CONF="backing:fixed")
    ran.check()


def test_memory_of_the_drivers_pools_is_refused_with_the_setting_that_helps(installed):
    ran = installed.code(PROCESSES + """
block = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
said = refused(reduce_tensor, block)
assert "backing:fixed" in said and "tensor.cpu()" in said, said
# The refusal has changed nothing.
del block
assert torch.cuda.memory_allocated() == 0
""", "", GRUYERE_ENABLE="1", GRUYERE_CONF="backing:pool")
    ran.check()


def test_a_stopped_sender_is_named_and_stops_no_other_thread_of_the_receiver(installed):
    ran = installed.code(PROCESSES + """
import signal, threading, time
def sender(handles):
    block = counted(5).cuda()
    handles.put((os.getpid(), reduce_tensor(block)))
    take(handles)
if __name__ == "__main__":
    handles = context.Queue()
    process = begin(sender, handles)
    pid, (rebuild, arguments) = take(handles)
    torch.cuda.init()
    os.kill(pid, signal.SIGSTOP)
    ticks, over = [], threading.Event()
    def tick():
        while not over.wait(0.1):
            ticks.append(torch.empty(1000, device="cuda").numel())
    ticker = threading.Thread(target=tick)
    ticker.start()
    said = refused(rebuild, *arguments)
    over.set()
    ticker.join()
    assert f"(PID {pid}) has not answered for 10 s" in said, said
    assert len(ticks) > 30, f"{len(ticks)} ticks in 10 s"
    os.kill(pid, signal.SIGCONT)
    assert ends(rebuild(*arguments)) == [0.0, 4.0]
    handles.put(None)
    process.join()
""", "", GRUYERE_ENABLE="1", **CONTENTS)
    ran.check()


def test_a_sender_ends_well_though_its_tensors_were_not_given_back(installed):
    """torch reads a list of its own that it has freed: without `end_well` of the shim most runs of
    this end by SIGSEGV."""
    ran = installed.code(PROCESSES + """
import time
def receiver(tensors, has_them):
    got = take(tensors)
    has_them.set()
    time.sleep(60)
if __name__ == "__main__":
    tensors, has_them = context.Queue(), context.Event()
    process = begin(receiver, tensors, has_them)
    tensors.put([counted(77).cuda() for _ in range(50)])
    has_them.wait()
    process.kill()
    process.join()
    print("done")
""", "", GRUYERE_ENABLE="1", **CONTENTS)
    assert ran.check().out == "done\n"


def test_what_receivers_keep_is_named_when_memory_runs_out(installed):
    """The sender has dropped each tensor; the receiver has a list of them."""
    ran = installed.code(PROCESSES + """
import subprocess
def receiver(tensors, has_it):
    kept = []
    while True:
        kept.append(take(tensors))
        has_it.put(len(kept))
if __name__ == "__main__":
    tensors, has_it = context.Queue(), context.Queue()
    process = begin(receiver, tensors, has_it)
    try:
        while True:
            tensors.put(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
            take(has_it)
    except torch.OutOfMemoryError as error:
        said = str(error)
    assert "was sent to other processes: each block stays until they have dropped it" in said, said
    assert "in the processes that received them" in said, said
    stat = [os.path.join(sys.prefix, "bin", "gruyere"), "stat", str(os.getpid())]
    told = json.loads(subprocess.check_output([*stat, "--json"]))["devices"][0]
    assert told["sent_bytes"] == told["live_bytes"] > 800 << 20, told
    assert "live, sent to other processes" in subprocess.check_output(stat, text=True)
    process.kill()
    process.join()
""", "", GRUYERE_ENABLE="1", **CONTENTS)
    ran.check()
