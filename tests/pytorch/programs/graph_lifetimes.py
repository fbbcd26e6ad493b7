"""What may happen to CUDA graphs in a program: callables made of modules, pools shared by several
graphs, forks inside a capture, captures that fail or run out of memory, graphs that go before, with
or after their outputs, and threads that allocate meanwhile."""

import gc
import threading

import torch
from torch import nn

import gpu

MIB = 1 << 20
gpu.install()
x = torch.zeros(MIB, device="cuda")


def held_for_graphs():
    return gpu.stats().captured if gpu.library else 0


def settled():
    """What nobody holds is gone, what may still run is done, and the allocator has seen it."""
    gc.collect()
    # One was made inside a capture, and torch keeps it.
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def apart(tensors, others):
    spans = [(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in tensors]
    for other in others:
        start, end = other.data_ptr(), other.data_ptr() + other.untyped_storage().nbytes()
        assert all(end <= low or high <= start for low, high in spans)


def captured(work, **how):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        result = work()
    return graph, result


def callables():
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = torch.cuda.make_graphed_callables(
        (model[:2], model[2:]),
        (
            (torch.zeros(64, 256, device="cuda"),),
            (torch.zeros(64, 512, device="cuda", requires_grad=True),),
        ),
    )
    for step in range(4):
        eager = [torch.empty((step + 1) * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        out = second(first(torch.zeros(64, 256, device="cuda")))
        apart([out], eager)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gpu.check_books()


def shared_pool():
    pool = torch.cuda.graph_pool_handle()
    kept = []
    for number in range(5):
        graph, out = captured(lambda: torch.cat([x * n for n in range(4)]).relu(), pool=pool)
        kept.append((graph, out))
        if number == 2:
            # One goes while its pool goes on.
            kept.pop(0)
    for graph, _ in kept:
        graph.replay()
    apart([out for _, out in kept], [torch.empty(4 * MIB, device="cuda") for _ in range(16)])
    outputs = [out for _, out in kept]
    del graph, kept, out
    # Released before the frees: the outputs keep their memory.
    apart(outputs, [torch.empty(4 * MIB, device="cuda") for _ in range(16)])
    gpu.check_books()


def forked_inside():
    side = torch.cuda.Stream()

    def work():
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = [y * n for n in range(3)]
            total = z[0] + z[1] + z[2]
        torch.cuda.current_stream().wait_stream(side)
        total.record_stream(torch.cuda.current_stream())
        return total * 2

    graph, out = captured(work)
    for _ in range(3):
        graph.replay()
        apart([out], [torch.empty(2 * MIB, device="cuda") for _ in range(4)])
    gpu.check_books()


def failing():
    """A copy to the host is forbidden inside; the capture is lost, and nothing else."""
    for _ in range(3):
        try:
            captured(lambda: (x * 3).sum().item())
        except RuntimeError as error:
            assert "captur" in str(error), error
        else:
            raise AssertionError("the capture should have failed")
        graph, out = captured(lambda: x * 3)
        graph.replay()
        gpu.check_books()


def out_of_memory_inside():
    """More than there is, asked for in a capture: torch's own exception, and the next capture
    works."""
    try:
        captured(
            lambda: [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4000)]
        )
    except torch.OutOfMemoryError as error:
        assert str(error).startswith("CUDA out of memory. Tried to allocate 64.00 MiB."), error
        caught = str(error)
    graph, _ = captured(lambda: x * 3)
    graph.replay()
    return caught


def reset_and_capture_again():
    graph = torch.cuda.CUDAGraph()
    for size in (1, 5, 3):
        with torch.cuda.graph(graph):
            out = torch.zeros(size * MIB, device="cuda") + 1
        graph.replay()
        del out
        graph.reset()
    gpu.check_books()


def in_flight_at_release():
    """The graph goes while a replay of it runs: its memory must stay out of eager hands until the
    device is past it."""
    side = torch.cuda.Stream()
    graph, out = captured(lambda: torch.cat([x * n for n in range(16)]))
    with torch.cuda.stream(side):
        graph.replay()
    before = held_for_graphs()
    del graph, out
    kept = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    still = held_for_graphs()
    settled()
    after = held_for_graphs()
    del kept
    return before, still, after


def threads():
    """Others allocate and free, on streams of their own, while captures come and go."""
    done = threading.Event()
    errors = []

    def eager(seed):
        try:
            stream = torch.cuda.Stream()
            kept = []
            with torch.cuda.stream(stream):
                while not done.is_set():
                    kept.append(
                        torch.empty(
                            1 + seed * 70_001 * (len(kept) + 1) % (3 * MIB),
                            dtype=torch.uint8,
                            device="cuda",
                        )
                    )
                    if len(kept) > 20:
                        kept.pop(0).record_stream(torch.cuda.default_stream())
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=eager, args=(seed,)) for seed in (3, 7)]
    for worker in workers:
        worker.start()
    for number in range(20):
        graph, out = captured(lambda: (x + number) * 2, capture_error_mode="thread_local")
        graph.replay()
    done.set()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    gpu.check_books()


def after_a_failed_capture():
    """torch never tells that a failed capture is over. What waits for other streams must come back
    all the same."""
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        block.record_stream(torch.cuda.current_stream())
        del block
        torch.cuda.synchronize()
    if gpu.witnessed:
        assert gpu.stats().pending <= 128 * MIB, gpu.stats().pending


callables()
shared_pool()
forked_inside()
reset_and_capture_again()
threads()
settled()
if gpu.witnessed:
    assert held_for_graphs() == 0, held_for_graphs()
before, still, after = in_flight_at_release()
failing()
after_a_failed_capture()
message = out_of_memory_inside()
del x
settled()
if gpu.witnessed and torch.__version__.startswith("2.13."):
    # It says that a failed capture has ended, and never that its graph is gone.
    stats = gpu.stats()
    assert stats.live == 0 and stats.captured == gpu.phantom.phantom_physical(0), stats
elif gpu.library:
    # torch's own allocator keeps what failed captures held.
    gpu.check_nothing_is_left(captured=True)
gpu.report(before=before, still=still, after=after, message=message)
