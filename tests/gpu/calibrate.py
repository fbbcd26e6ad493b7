"""(f) What the driver's calls cost and do, where its documentation is silent: numbers that
Gruyère's design rests on.

Memory is created, mapped and given access to as the library does it (`created_with` in the answer);
further times are of memory created with nothing special, so that the difference is seen. Calls go
to libcuda through ctypes, whose own cost (well under a microsecond) is in each number. torch is
there for its long kernels and to hold the device's primary context."""

from __future__ import annotations

import random
import statistics
import threading
import time
from ctypes import byref, c_uint32
from typing import Any, Callable, Dict, List

import torch

import machine
from driver import (
    OUT_OF_MEMORY,
    PAGE,
    PLAIN,
    POOLS_SUPPORTED,
    RESERVED_CURRENT,
    RESERVED_HIGH,
    USED_CURRENT,
    USED_HIGH,
    VMM_SUPPORTED,
    Creation,
    Driver,
    DriverError,
)
from machine import GIB, MIB

# The handles that the library creates: from a page to its longest chunk
# (`LONGEST_CHUNK` in crates/heap/src/supply/pages/mod.rs).
MAPPED = (PAGE, 16 * MIB, 64 * MIB)
POOLED = (2 * MIB, 32 * MIB, 128 * MIB)


class Clock:
    """Microseconds of calls, by name."""

    def __init__(self) -> None:
        self.times: Dict[str, List[float]] = {}

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter_ns()
        result = call()
        self.times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e3)
        return result

    def summary(self) -> Dict[str, Any]:
        return {
            name: {"median_us": statistics.median(times), "max_us": max(times), "calls": len(times)}
            for name, times in self.times.items()
        }


def vmm_costs(driver: Driver, size: int, rounds: int, creation: Creation) -> Dict[str, Any]:
    """Each call of a handle's life, one handle at a time; then a row of them, which gets access in
    one call and goes in one, as the library's do."""
    clock = Clock()
    for _ in range(rounds):
        address = clock.time("reserve", lambda: driver.reserve(size))
        handle = clock.time("create", lambda: driver.create(size, creation))
        clock.time("map", lambda: driver.cuMemMap(address, size, 0, handle, 0))
        clock.time("setAccess", lambda: driver.allow(address, size))
        clock.time("unmap", lambda: driver.cuMemUnmap(address, size))
        clock.time("release", lambda: driver.cuMemRelease(handle))
        clock.time("addressFree", lambda: driver.cuMemAddressFree(address, size))
    row = max(1, 256 * MIB // size)
    address = driver.reserve(row * size)
    handles = [driver.create(size, creation) for _ in range(row)]
    for index, handle in enumerate(handles):
        driver.cuMemMap(address + index * size, size, 0, handle, 0)
    clock.time(f"setAccess of {row} mappings at once", lambda: driver.allow(address, row * size))
    clock.time(f"unmap of {row} mappings at once", lambda: driver.cuMemUnmap(address, row * size))
    for handle in handles:
        driver.cuMemRelease(handle)
    driver.cuMemAddressFree(address, row * size)
    return clock.summary()


def pool_costs(driver: Driver, size: int, rounds: int) -> Dict[str, Any]:
    """Each call of a pool: what it has to get from the device, what it has already, and what it
    gives back."""
    clock = Clock()
    stream = driver.stream()
    room = max(4 * size, 256 * MIB)
    for _ in range(max(rounds // 4, 2)):
        pool = clock.time("create", lambda: driver.pool(room))
        address = clock.time("first alloc (miss)", lambda: driver.allocate(pool, size, stream))
        clock.time("free", lambda: driver.cuMemFreeAsync(address, stream))
        for _ in range(8):
            address = clock.time("alloc (hit)", lambda: driver.allocate(pool, size, stream))
            clock.time("free", lambda: driver.cuMemFreeAsync(address, stream))
        driver.cuStreamSynchronize(stream)
        clock.time("trim", lambda: driver.cuMemPoolTrimTo(pool, 0))
        clock.time("destroy", lambda: driver.cuMemPoolDestroy(pool))
    # A threshold of 0: the memory goes back at the synchronisation.
    eager = driver.pool(room, keep=False)
    for _ in range(max(rounds // 4, 2)):
        address = driver.allocate(eager, size, stream)
        driver.cuMemFreeAsync(address, stream)
        clock.time("synchronise that gives back", lambda: driver.cuStreamSynchronize(stream))
    driver.cuMemPoolDestroy(eager)
    for _ in range(rounds):
        plain = clock.time("cuMemAlloc", lambda: driver.plain(size))
        clock.time("cuMemFree", lambda: driver.cuMemFree_v2(plain))
    driver.cuStreamDestroy_v2(stream)
    return clock.summary()


def stalls(driver: Driver) -> Dict[str, Any]:
    """Whether map, setAccess and unmap of memory that no kernel uses wait for a running kernel, and
    whether they slow one down: a row of pages, as the library maps one."""
    count = 64
    address = driver.reserve(count * PAGE)
    handles = [driver.create(PAGE) for _ in range(count)]

    def map_all() -> None:
        for index, handle in enumerate(handles):
            driver.cuMemMap(address + index * PAGE, PAGE, 0, handle, 0)

    def allow_all() -> None:
        driver.allow(address, count * PAGE)

    def unmap_all() -> None:
        driver.cuMemUnmap(address, count * PAGE)

    # A kernel that lasts, then one that streams through memory: the first tells whether the host
    # waits, the second whether the device does.
    data = torch.zeros(512 * MIB // 4, device="cuda")
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def busy() -> None:
        for _ in range(40):
            data.add_(1.0)

    def alone() -> float:
        begun.record()
        busy()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended)

    alone()
    reference = statistics.median(alone() for _ in range(5))
    result: Dict[str, Any] = {"kernels_alone_ms": reference}
    calls = (("map", map_all), ("setAccess", allow_all), ("unmap", unmap_all))
    for name, call in calls:
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        still_running = not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        result[f"{name}: the host waits for a running kernel"] = not still_running
        result[f"{name} of {count} pages under a running kernel, us"] = 1e6 * took
    for name, _ in calls:
        result[f"kernels with {name}s of other memory beside them, times as long"] = []
    for _ in range(3):
        for name, call in calls:
            torch.cuda.synchronize()
            begun.record()
            busy()
            ended.record()
            call()
            ended.synchronize()
            slower = begun.elapsed_time(ended) / reference if reference else None
            result[f"kernels with {name}s of other memory beside them, times as long"].append(
                slower
            )
    for handle in handles:
        driver.cuMemRelease(handle)
    driver.cuMemAddressFree(address, count * PAGE)
    return result


def aliases(driver: Driver, rounds: int) -> Dict[str, Any]:
    """A page is mapped at two addresses. On one stream, what is written through the one is read
    through the other, and the other way round, without a wait of the host's: how often the read was
    stale (0 means that reuse through an alias is ordered by the stream)."""
    words = PAGE // 4
    first, second = driver.reserve(PAGE), driver.reserve(PAGE)
    handle = driver.create(PAGE)
    for address in (first, second):
        driver.cuMemMap(address, PAGE, 0, handle, 0)
        driver.allow(address, PAGE)
    stream = driver.stream()
    seen = torch.zeros(rounds, dtype=torch.int32, pin_memory=True)
    torchs = torch.cuda.ExternalStream(stream)
    views = [as_tensor(address, words) for address in (first, second)]
    kernels_stale = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for index in range(rounds):
        write, read = (first, second) if index % 2 else (second, first)
        driver.cuMemsetD32Async(write, index + 1, words, stream)
        driver.cuMemcpyDtoHAsync_v2(
            seen.data_ptr() + 4 * index, read + 4 * (index * 97 % words), 4, stream
        )
    # By kernels, whose caches are those that could be stale.
    with torch.cuda.stream(torchs):
        for index in range(rounds):
            write, read = views[index % 2], views[1 - index % 2]
            write.fill_(index + 1)
            kernels_stale += (read != index + 1).sum()
    driver.cuStreamSynchronize(stream)
    stale = int((seen != torch.arange(1, rounds + 1, dtype=torch.int32)).sum())
    result = {
        "rounds": rounds,
        "stale_copies": stale,
        "stale_elements_in_kernels": int(kernels_stale.item()),
    }
    # The old mapping goes while work through the new one is still to run.
    driver.cuMemsetD32Async(first, 1, words, stream)
    driver.cuStreamSynchronize(stream)
    with torch.cuda.stream(torchs):
        torch.cuda._sleep(20_000_000)
        views[1].fill_(7)
    driver.cuMemUnmap(first, PAGE)
    value = c_uint32()
    driver.cuMemcpyDtoHAsync_v2(byref(value), second, 4, stream)
    driver.cuStreamSynchronize(stream)
    result["unmapping one alias under work through the other"] = (
        "kept" if value.value == 7 else f"read {value.value}, not 7"
    )
    driver.cuMemUnmap(second, PAGE)
    driver.cuMemRelease(handle)
    for address in (first, second):
        driver.cuMemAddressFree(address, PAGE)
    driver.cuStreamDestroy_v2(stream)
    return result


def as_tensor(address: int, words: int) -> torch.Tensor:
    """Memory that torch did not allocate, as a tensor."""

    class Raw:
        __cuda_array_interface__ = {
            "shape": (words,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Raw(), device="cuda")


def address_space() -> int:
    """This process's address space, bytes (VmSize)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))


def pool_address_space(driver: Driver) -> Dict[str, Any]:
    result = {}
    stream = driver.stream()
    for name, max_size in (
        ("without maxSize", 0),
        ("maxSize 2 MiB", 2 * MIB),
        ("maxSize 1 GiB", GIB),
    ):
        before = address_space()
        pool = driver.pool(max_size)
        created = address_space() - before
        used = None
        try:
            address = driver.allocate(pool, 2 * MIB, stream)
            used = address_space() - before
            driver.cuMemFreeAsync(address, stream)
        except DriverError as error:
            # Whether a pool can be filled to its maxSize is for the driver to say.
            if error.code != OUT_OF_MEMORY:
                raise
        driver.cuStreamSynchronize(stream)
        driver.cuMemPoolDestroy(pool)
        result[name] = {
            "created_bytes": created,
            "after_one_alloc_bytes": used,
            "after_destroy_bytes": address_space() - before,
        }
    # A second pool beside the first: whether they share.
    before = address_space()
    pools = [driver.pool() for _ in range(2)]
    for pool in pools:
        driver.cuMemFreeAsync(driver.allocate(pool, 2 * MIB, stream), stream)
    result["two without maxSize"] = {"after_one_alloc_bytes": address_space() - before}
    driver.cuStreamSynchronize(stream)
    for pool in pools:
        driver.cuMemPoolDestroy(pool)
    driver.cuStreamDestroy_v2(stream)
    return result


def fragmenting(driver: Driver, operations: int) -> Dict[str, Any]:
    """A driver pool under a trace that fragments: blocks of 64 KiB to 64 MiB whose lives differ,
    every other one freed, larger ones asked for; at most 3 GiB live."""
    dice = random.Random(5)
    pool = driver.pool()
    stream = driver.stream()
    live: List[Any] = []
    total = 0
    curve = []
    for number in range(operations):
        wave = 1 + number * 4 // operations
        size = (64 << 10) * dice.randrange(1, 1 << dice.randrange(2, 7 + wave))
        while total + size > 3 * GIB:
            address, freed = live.pop(dice.randrange(len(live)))
            driver.cuMemFreeAsync(address, stream)
            total -= freed
        live.append((driver.allocate(pool, size, stream), size))
        total += size
        if number % (operations // 4) == operations // 4 - 1:
            for address, freed in live[::2]:
                driver.cuMemFreeAsync(address, stream)
                total -= freed
            live = live[1::2]
        if number % (operations // 16) == 0:
            reserved, used = (
                driver.pool_bytes(pool, which) for which in (RESERVED_CURRENT, USED_CURRENT)
            )
            curve.append({"live": total, "used": used, "reserved": reserved})
    driver.cuStreamSynchronize(stream)
    high = {
        "reserved_high": driver.pool_bytes(pool, RESERVED_HIGH),
        "used_high": driver.pool_bytes(pool, USED_HIGH),
    }
    driver.cuMemPoolTrimTo(pool, 0)
    trimmed = driver.pool_bytes(pool, RESERVED_CURRENT)
    for address, _ in live:
        driver.cuMemFreeAsync(address, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuMemPoolDestroy(pool)
    driver.cuStreamDestroy_v2(stream)
    return {
        **high,
        "hold": high["reserved_high"] / max(high["used_high"], 1),
        "live_at_trim": total,
        "reserved_after_trim": trimmed,
        "curve": curve,
    }


def concurrent(driver: Driver, threads: int, pairs: int) -> Dict[str, Any]:
    """Pairs of alloc and free from many threads, each on its own stream, from one pool; Python's
    lock is in the numbers."""
    pool = driver.pool(4 * GIB)
    failures: List[str] = []
    spans: List[Any] = []
    ready = threading.Barrier(threads)

    def work() -> None:
        try:
            driver.enter()
            stream = driver.stream()
            ready.wait()
            start = time.perf_counter()
            for index in range(pairs):
                address = driver.allocate(pool, 512 << (index % 8), stream)
                driver.cuMemFreeAsync(address, stream)
            spans.append((start, time.perf_counter()))
            driver.cuStreamSynchronize(stream)
            driver.cuStreamDestroy_v2(stream)
        except (DriverError, threading.BrokenBarrierError) as error:
            failures.append(str(error))
            ready.abort()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    left = driver.pool_bytes(pool, USED_CURRENT)
    driver.cuMemPoolDestroy(pool)
    assert not failures, failures
    took = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "pairs_per_s": threads * pairs / took,
        "us_a_pair_and_thread": 1e6 * took / pairs,
        "left_used": left,
    }


def main(allocator: str, rounds: int = 40) -> Dict[str, Any]:
    machine.install(allocator)
    run = machine.kernels_run()
    driver = Driver()
    driver.enter()
    result: Dict[str, Any] = {}
    free = driver.free_memory()
    # A round of 128 MiB clears 5 GB on the device: fewer of them.
    scaled = {size: max(4, rounds // max(1, size // (16 * MIB))) for size in {*MAPPED, *POOLED}}
    if driver.attribute(VMM_SUPPORTED):
        result["created_with"] = driver.creation.told()
        result["vmm"] = {
            f"{size // MIB} MiB": vmm_costs(driver, size, scaled[size], driver.creation)
            for size in MAPPED
        }
        # The difference, if there is one, grows with the size or does not: both ends.
        result["vmm_plain"] = {
            f"{size // MIB} MiB": vmm_costs(driver, size, scaled[size], PLAIN)
            for size in (MAPPED[0], MAPPED[-1])
        }
        result["stalls"] = stalls(driver)
        result["aliases"] = aliases(driver, 50 * rounds)
        if run:
            assert (
                result["aliases"]["stale_copies"]
                == result["aliases"]["stale_elements_in_kernels"]
                == 0
            ), result["aliases"]
        result["set_access_not_ready"] = driver.not_ready
    if driver.attribute(POOLS_SUPPORTED):
        result["pools"] = {
            f"{size // MIB} MiB": pool_costs(driver, size, scaled[size]) for size in POOLED
        }
        result["pool_address_space"] = pool_address_space(driver)
        result["pool_fragmentation"] = fragmenting(driver, 100 * rounds)
        result["concurrent_pool"] = {
            str(threads): concurrent(driver, threads, 50 * rounds) for threads in (1, 2, 4, 8, 16)
        }
        assert not any(measured["left_used"] for measured in result["concurrent_pool"].values())
        fragmentation = result["pool_fragmentation"]
        assert fragmentation["reserved_high"] >= fragmentation["used_high"] > 0
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    result["leaked_bytes"] = max(0, free - driver.free_memory())
    return result


if __name__ == "__main__":
    machine.part(main)
