"""The driver by ctypes: what the parts need of libcuda that torch does not offer."""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ushort,
    c_void_p,
)
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Optional

from machine import MIB

OUT_OF_MEMORY = 2
NOT_READY = 600

# CUdevice_attribute
VMM_SUPPORTED = 102
POSIX_FILES_SUPPORTED = 103
RDMA_SUPPORTED = 110
POOLS_SUPPORTED = 115
# CUmemAllocationHandleType
NO_TYPE, POSIX_FILE = 0, 1
# CUmemPool_attribute
RELEASE_THRESHOLD = 4
RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT, USED_HIGH = 5, 6, 7, 8


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AllocationProp(Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("flags", AllocationFlags),
    ]


class AccessDesc(Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


class PoolProps(Structure):
    """CUmemPoolProps, 88 bytes; maxSize from CUDA 12.2 on."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("max_size", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 54),
    ]


assert ctypes.sizeof(AllocationProp) == 32 and ctypes.sizeof(PoolProps) == 88

_SIGNATURES = {
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemPoolCreate": (POINTER(c_void_p), POINTER(PoolProps)),
    "cuMemPoolDestroy": (c_void_p,),
    "cuMemPoolTrimTo": (c_void_p, c_size_t),
    "cuMemPoolGetAttribute": (c_void_p, c_int, c_void_p),
    "cuMemPoolSetAttribute": (c_void_p, c_int, c_void_p),
    "cuMemAllocFromPoolAsync": (POINTER(c_uint64), c_size_t, c_void_p, c_void_p),
    "cuMemFreeAsync": (c_uint64, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
}


class DriverError(RuntimeError):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} answered {code}")
        self.code = code


# Times that access is asked for while the driver is not ready, and the longest wait between two of
# them, seconds: the library's (src/driver/cuda/creation.rs).
ATTEMPTS, LONGEST_WAIT = 100, 1e-3
# What the library maps, and what its reservations are aligned to.
PAGE = 2 * MIB


@dataclass(frozen=True)
class Creation:
    """As what physical memory is created."""

    handle_type: int = NO_TYPE
    rdma: bool = False

    def told(self) -> Dict[str, Any]:
        return {
            "handle_type": {NO_TYPE: "none", POSIX_FILE: "posix"}[self.handle_type],
            "rdma": self.rdma,
        }


PLAIN = Creation()


class Driver:
    """Each function of libcuda above, under its name; one that answers other than 0 raises
    DriverError. The calls let the GIL go."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes = arguments
            function.restype = c_int
        # How often access could not be given yet.
        self.not_ready = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise DriverError(name, code)

        setattr(self, name, call)
        return call

    def attribute(self, which: int) -> int:
        value = c_int()
        self.cuDeviceGetAttribute(byref(value), which, 0)
        return value.value

    def enter(self) -> None:
        """This thread works in device 0's primary context, the one that torch uses."""
        context = c_void_p()
        self.cuDevicePrimaryCtxRetain(byref(context), 0)
        self.cuCtxSetCurrent(context)

    def stream(self) -> int:
        """A stream that does not wait for the default one (CU_STREAM_NON_BLOCKING)."""
        stream = c_void_p()
        self.cuStreamCreate(byref(stream), 1)
        assert stream.value is not None
        return stream.value

    def free_memory(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value

    # Virtual memory management.

    def reserve(self, size: int) -> int:
        address = c_uint64()
        self.cuMemAddressReserve(byref(address), size, PAGE, 0, 0)
        return address.value

    @cached_property
    def creation(self) -> Creation:
        """As what the library creates memory here (`handle_type:auto`): of what the device offers,
        the first that a page proves."""
        types = (POSIX_FILE, NO_TYPE) if self.attribute(POSIX_FILES_SUPPORTED) else (NO_TYPE,)
        flags = (True, False) if self.attribute(RDMA_SUPPORTED) else (False,)
        ways = [Creation(handle_type, rdma) for handle_type in types for rdma in flags]
        return next(way for way in ways if way == PLAIN or self.works(way))

    def works(self, creation: Creation) -> bool:
        """Whether a page made so can be exported, mapped and accessed. Devices have said so, and
        then refused."""
        try:
            handle = self.create(PAGE, creation)
            try:
                if creation.handle_type == POSIX_FILE:
                    self.export(handle)
                self.give_access_once(handle)
            finally:
                self.cuMemRelease(handle)
        except DriverError as error:
            # That says nothing of the device.
            if error.code == OUT_OF_MEMORY:
                raise
            return False
        return True

    def export(self, handle: int) -> None:
        """As NCCL does; what comes of it is closed."""
        descriptor = c_int()
        self.cuMemExportToShareableHandle(byref(descriptor), handle, POSIX_FILE, 0)
        if descriptor.value >= 0:
            os.close(descriptor.value)

    def give_access_once(self, handle: int) -> None:
        address = self.reserve(PAGE)
        try:
            self.cuMemMap(address, PAGE, 0, handle, 0)
            try:
                self.allow(address, PAGE)
            finally:
                self.cuMemUnmap(address, PAGE)
        finally:
            self.cuMemAddressFree(address, PAGE)

    def create(self, size: int, creation: Optional[Creation] = None) -> int:
        """Physical memory, as the library creates it where nothing else is said."""
        way = creation or self.creation
        prop = AllocationProp(
            type=1,
            handle_types=way.handle_type,
            location=Location(1, 0),
            flags=AllocationFlags(rdma=way.rdma),
        )
        handle = c_uint64()
        self.cuMemCreate(byref(handle), size, byref(prop), 0)
        return handle.value

    def allow(self, address: int, size: int) -> None:
        """Read and write access of device 0, in one call for all that is mapped there."""
        access = AccessDesc(Location(1, 0), 3)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.cuMemSetAccess(address, size, byref(access), 1)
                return
            except DriverError as error:
                if error.code != NOT_READY or attempt == ATTEMPTS:
                    raise
            self.not_ready += 1
            time.sleep(min(1e-5 * 2**attempt, LONGEST_WAIT))

    def plain(self, size: int) -> int:
        address = c_uint64()
        self.cuMemAlloc_v2(byref(address), size)
        return address.value

    # Pools.

    def pool(self, max_size: int = 0, keep: bool = True) -> c_void_p:
        pool = c_void_p()
        props = PoolProps(type=1, location=Location(1, 0), max_size=max_size)
        self.cuMemPoolCreate(byref(pool), byref(props))
        threshold = c_uint64((1 << 64) - 1 if keep else 0)
        self.cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, byref(threshold))
        return pool

    def pool_bytes(self, pool: c_void_p, which: int) -> int:
        value = c_uint64()
        self.cuMemPoolGetAttribute(pool, which, byref(value))
        return value.value

    def allocate(self, pool: c_void_p, size: int, stream: int) -> int:
        address = c_uint64()
        self.cuMemAllocFromPoolAsync(byref(address), size, pool, stream)
        return address.value
