"""Lifetimes, checkpoints, alerts and numbers from Python: `marks.py PART`. Each part asserts what
the package promises."""

import io
import sys
import threading
import time

import torch

import gpu
import gruyere

MIB = 1 << 20
gruyere.enable()


def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def live():
    lifetimes = gpu.from_outside()["devices"][0]["lifetimes"]
    return {name: counts["live_bytes"] // MIB for name, counts in lifetimes.items()}


def lifetimes():
    """What the program says counts: nested, as a decorator, on its own thread, and whatever is
    raised."""
    kept = [tensor(1)]
    with gruyere.lifetime("persistent"):
        kept.append(tensor(2))
        with gruyere.lifetime("step"):
            kept.append(tensor(4))
        other = threading.Thread(target=lambda: kept.append(tensor(8)))
        other.start()
        other.join()
        kept.append(tensor(16))

    workspace = gruyere.lifetime("transient")

    @workspace
    def work(depth):
        kept.append(tensor(32))
        if depth:
            work(depth - 1)
        raise KeyError

    try:
        work(1)
    except KeyError:
        kept.append(tensor(64))
    assert live() == {"auto": 73, "transient": 64, "step": 4, "persistent": 18}, live()
    try:
        with gruyere.lifetime("step"), gruyere.pool("kv"):
            kept.append(tensor(1))
            raise KeyError
    except KeyError:
        kept.append(tensor(1))
    assert live()["step"] == 5 and live()["auto"] == 74
    # What a module gets when it is made on the device, if there is memory under it.
    with torch.device("cuda"):
        layer = torch.nn.Linear(1024, 1024)
        lazy = torch.nn.LazyLinear(1024, bias=False)
    lazy(torch.zeros(1, 1024, device="cuda"))
    assert live()["persistent"] == 18 + 4, (live(), layer, lazy)
    gpu.check_books()


def placed():
    """Where memory lies is the program's word: what it says places, before and after the package
    has counted what it knows by itself."""

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def linear():
        return torch.nn.Linear(1024, 1024, bias=False)

    by_itself = linear().cuda()
    kept = [by_itself, train(by_itself)]
    assert live()["persistent"] == 12 and set(gpu.placed()) == {"auto"}, (live(), gpu.placed())
    with gruyere.lifetime("persistent"):
        kept += [linear().cuda(), torch.nn.Linear(1024, 1024, bias=False, device="cuda"), tensor(3)]
    with gruyere.lifetime("step"):
        kept.append(linear().cuda())
    assert live()["persistent"] == 12 + 8 + 3 + 4, live()
    found = gpu.placed()
    assert (found["persistent"], found["step"]) == (11 * MIB, 4 * MIB), found
    gpu.check_books()


def recurrent():
    """Recurrent layers are persistent where cuDNN would have them: moved once more, when they are
    on the device."""

    def flatten(layer):
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()

    torch.nn.RNNBase.flatten_parameters = flatten
    alone, inside = (
        torch.nn.LSTM(512, 512, bias=False),
        torch.nn.Sequential(torch.nn.GRU(512, 512, bias=False)),
    )
    alone.cuda(), inside.cuda()
    assert live()["persistent"] == 8 + 6, live()


def numbers():
    """stats() says what the device holds, trim() gives back, and torch.save does at a low moment,
    not too often."""
    kept, step = tensor(100), tensor(300)
    del step
    before = gruyere.stats()
    assert (before.live, before.live_peak) == (100 * MIB, 400 * MIB), before
    assert before.reserved == gpu.phantom.phantom_physical(0) >= 400 * MIB
    assert 0.7 < before.unused < 0.8 and before == gruyere.stats("cuda:0") == gruyere.stats(
        torch.device("cuda")
    )
    torch.save({"step": torch.ones(3)}, io.BytesIO())
    assert gruyere.stats().reserved < 200 * MIB, "trimmed around torch.save"
    del kept
    kept = tensor(300)
    del kept
    torch.save({"step": torch.ones(3)}, io.BytesIO())
    assert gruyere.checkpoint() == 0 and gruyere.stats().reserved >= 300 * MIB, "not again so soon"
    assert gruyere.trim() >= 300 * MIB and gruyere.stats().reserved == 0
    gpu.check_books()


def alerts():
    """Who listens hears of short memory, on another thread, also after a listener has failed."""
    heard, threads = [], set()

    @gruyere.on_alert
    def fails(alert):
        raise KeyError("the listener's own fault")

    @gruyere.on_alert
    def listens(alert):
        threads.add(threading.current_thread())
        heard.append(alert)

    assert gruyere.on_alert(listens) is listens, "once"
    for _ in range(2):
        try:
            tensor(1 << 20)
        except torch.OutOfMemoryError:
            pass
    end = time.monotonic() + 60
    while len(heard) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    kinds = [(alert.kind, alert.count) for alert in heard]
    assert kinds == [("reclaim", 1), ("out_of_memory", 1), ("reclaim", 2), ("out_of_memory", 2)], (
        kinds
    )
    assert all((alert.asked, alert.device, alert.lost) == (1 << 40, 0, 0) for alert in heard)
    assert [thread.daemon for thread in threads] == [
        True
    ] and threading.current_thread() not in threads


def thresholds():
    """Who listens hears of a passed threshold of `alert:`, with its text and the value."""
    heard = []
    gruyere.on_alert(heard.append)
    kept = tensor(600)
    gruyere.step()
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    (alert,) = heard
    assert (alert.kind, alert.threshold, alert.value, alert.count) == (
        "threshold",
        "live>500MiB",
        600 * MIB,
        1,
    ), alert
    assert (alert.device, alert.live, alert.asked) == (0, 600 * MIB, 0), alert
    del kept


{part.__name__: part for part in (lifetimes, placed, recurrent, numbers, alerts, thresholds)}[
    sys.argv[1]
]()
