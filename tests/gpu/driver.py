"""The driver by ctypes: the streams of the canaries, which torch does not destroy."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_uint, c_void_p
from typing import Any

_SIGNATURES = {
    "cuCtxSetCurrent": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
}


class Driver:
    """Each function of libcuda above, under its name; one that returns another code than 0 raises
    RuntimeError. The calls release the GIL."""

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
                raise RuntimeError(f"{name} returned {code}")

        setattr(self, name, call)
        return call

    def enter(self) -> None:
        """Makes device 0's primary context, which torch uses, this thread's context."""
        context = c_void_p()
        self.cuDevicePrimaryCtxRetain(byref(context), 0)
        self.cuCtxSetCurrent(context)

    def stream(self) -> int:
        """A stream that does not wait for the default one (CU_STREAM_NON_BLOCKING)."""
        stream = c_void_p()
        self.cuStreamCreate(byref(stream), 1)
        assert stream.value is not None
        return stream.value
