"""The driver by ctypes: what the parts need of libcuda that torch does not offer."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

OUT_OF_MEMORY = 2
NOT_READY = 600

# CUdevice_attribute
VMM_SUPPORTED = 102
POOLS_SUPPORTED = 115
# CUmemPool_attribute
RELEASE_THRESHOLD = 4
RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT, USED_HIGH = 5, 6, 7, 8


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


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


class Driver:
    """Each function of libcuda above, under its name; one that answers other than 0 raises DriverError. The calls let the GIL go."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes = arguments
            function.restype = c_int

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
        self.cuMemAddressReserve(byref(address), size, 0, 0, 0)
        return address.value

    def create(self, size: int) -> int:
        handle = c_uint64()
        prop = AllocationProp(type=1, location=Location(1, 0))
        self.cuMemCreate(byref(handle), size, byref(prop), 0)
        return handle.value

    def allow(self, address: int, size: int) -> None:
        """Read and write access of device 0."""
        access = AccessDesc(Location(1, 0), 3)
        self.cuMemSetAccess(address, size, byref(access), 1)

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
