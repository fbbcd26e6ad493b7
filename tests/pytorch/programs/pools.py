"""Pools from Python: `pools.py PART`. Each part asserts what the package promises."""

import gc
import sys
import threading

import torch

import gpu
import gruyere

MIB = 1 << 20


def physical():
    torch.cuda.synchronize()
    return gpu.phantom.phantom_physical(0)


def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def refused(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
        return error
    raise AssertionError(f"not refused: it should have named {words}")


def whole():
    """A pool goes back whole, or names what lives in it."""
    refused(gruyere.GruyereError, lambda: gruyere.pool("early"), "not enabled", "gruyere.enable()")
    gruyere.enable()
    tensor(1)
    before = physical()
    pool = gruyere.pool("kv-cache", reserve="256MiB")
    assert physical() >= before + 256 * MIB
    with pool as entered:
        assert entered is pool
        inside = [tensor(100), tensor(1), torch.empty(10, device="cuda")]
    outside = tensor(7)
    numbers = pool.stats()
    assert (numbers.live, numbers.live_blocks, numbers.reserve) == (
        101 * MIB + 512,
        3,
        256 * MIB,
    ), numbers
    error = refused(
        gruyere.PoolInUse,
        pool.release,
        "kv-cache",
        "3 blocks",
        "100.00 MiB of step 0",
        "drop every tensor",
    )
    assert [block.bytes for block in error.blocks] == [100 * MIB, MIB, 40]
    assert error.blocks[0].step == 0 and error.blocks[0].address == inside[0].data_ptr()
    assert physical() >= before + 256 * MIB, "nothing has happened"
    del error
    inside.clear()
    given = pool.release()
    assert given >= 256 * MIB and pool.stats().held == 0
    assert physical() <= before + 40 * MIB, (physical(), before)
    # Again, with a cycle that only the collector finds.
    with pool:
        cycle = [tensor(50)]
    cycle.append(cycle)
    gc.disable()
    del cycle
    assert pool.release() >= 50 * MIB
    gc.enable()
    assert pool.destroy() == 0
    refused(gruyere.GruyereError, pool.release, "kv-cache", "destroyed")
    del outside
    gpu.check_books()


def routes():
    """Which allocations go to a pool."""
    gruyere.enable()
    outer, inner = gruyere.pool("outer"), gruyere.pool("inner", limit="64MiB")
    assert gruyere.pool("outer", reserve=MIB).stats().reserve == 2 * MIB, (
        "the same pool, in whole pages"
    )

    def live(pool):
        return pool.stats().live // MIB

    kept = []
    with outer:
        kept.append(tensor(1))
        with inner:
            kept.append(tensor(2))
        kept.append(tensor(4))
        other = threading.Thread(target=lambda: kept.append(tensor(8)))
        other.start()
        other.join()
        try:
            with inner:
                raise KeyError("the pool is left")
        except KeyError:
            kept.append(tensor(16))
    kept.append(tensor(32))
    assert (live(outer), live(inner)) == (21, 2), (live(outer), live(inner))
    with inner:
        text = str(refused(torch.OutOfMemoryError, lambda: tensor(63)))
        assert "CUDA out of memory" in text and "inner" in text and "limit" in text, text
        kept.append(tensor(62))
    # Side streams share the pool in stream order.
    side = torch.cuda.Stream()
    with outer, torch.cuda.stream(side):
        kept.append(tensor(3))
    kept[-1].record_stream(torch.cuda.current_stream())
    kept.clear()
    assert outer.release() > 0 and inner.release() > 0
    for call, words in {
        "pool('')": ["1 to 128 bytes"],
        "pool('x', reserve='lots')": ["reserve='lots'", "1.5GiB"],
        "pool('x', reserve=-1)": ["reserve=-1"],
        "pool('x', limit='0')": ["limit='0'", "None"],
        "pool('x', reserve='4MiB', limit='1MiB')": ["reserve", "limit"],
        "pool('x', reserve='100%')": ["could not be reserved", "headroom"],
        "pool('x', device='cpu')": ["cpu", "not a CUDA device"],
        "pool('x', device=9)": ["no device 9"],
        "lifetime('forever')": ["'forever'", "'persistent'"],
        "on_alert(3)": ["on_alert(3)"],
        "stats(9)": ["no device 9"],
    }.items():
        refused(gruyere.GruyereError, lambda call=call: eval(f"gruyere.{call}"), *words)
    gpu.check_books()


{part.__name__: part for part in (whole, routes)}[sys.argv[1]]()
