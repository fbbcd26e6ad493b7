"""libgruyere.so where there is no libcuda at all: it loads, and every entry answers."""

import re
import subprocess
import sys

from conftest import GRUYERE, clean_environment

CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
zero64, key = ctypes.c_uint64(0), ctypes.c_uint64(1)
buffer = ctypes.create_string_buffer(4096)
ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0] = 4096
pointer = ctypes.c_void_p(0x7f0000000000)

def by_table(table):
    table.restype = ctypes.c_void_p
    assert table(ctypes.c_uint32(0)) is None, "a version that there is not"
    words = (ctypes.c_size_t * 6).from_address(table(ctypes.c_uint32(1)))
    number, handle = ctypes.c_int, ctypes.c_void_p
    malloc = ctypes.CFUNCTYPE(handle, ctypes.c_uint64, number, handle)(words[1])
    is_out_of_memory = ctypes.CFUNCTYPE(number)(words[2])
    free = ctypes.CFUNCTYPE(None, handle, ctypes.c_ssize_t, number, handle)(words[4])
    block = ctypes.CFUNCTYPE(ctypes.c_uint64, handle, handle)(words[5])
    assert malloc(1 << 20, 0, None) is None and is_out_of_memory() == 0
    free(pointer, 1 << 20, 0, None)
    assert block(pointer, ctypes.addressof(buffer)) == 0

calls = {
    "gruyere_malloc": lambda f: f(ctypes.c_ssize_t(1 << 20), 0, None),
    "gruyere_free": lambda f: f(pointer, ctypes.c_ssize_t(1 << 20), 0, None),
    "gruyere_init": lambda f: f(1),
    "gruyere_reset": lambda f: f(),
    "gruyere_memory_fraction": lambda f: f(ctypes.c_double(0.5), 0),
    "gruyere_base_alloc": lambda f: f(pointer, buffer),
    "gruyere_record_stream": lambda f: f(pointer, None),
    "gruyere_begin_allocate_to_pool": lambda f: f(0, ctypes.c_uint64(0), ctypes.c_uint64(1), None),
    "gruyere_end_allocate_to_pool": lambda f: f(0, ctypes.c_uint64(0), ctypes.c_uint64(1)),
    "gruyere_release_pool": lambda f: f(0, ctypes.c_uint64(0), ctypes.c_uint64(1)),
    "gruyere_announce_hooks": lambda f: f(3),
    "gruyere_allow_waits": lambda f: f(),
    "gruyere_forbid_waits": lambda f: f(b"a test"),
    "gruyere_announce_rank": lambda f: f(ctypes.c_int64(1), ctypes.c_int64(2)),
    "gruyere_stream_lasts": lambda f: f(0, ctypes.c_void_p(64)),
    "gruyere_mark_work": lambda f: f(0, ctypes.c_void_p(64)),
    "gruyere_stream_waits": lambda f: f(0, ctypes.c_void_p(64), ctypes.c_uint64(1)),
    "gruyere_stream_ends": lambda f: f(0, ctypes.c_void_p(64)),
    "gruyere_tell_profiler": lambda f: f(1),
    "gruyere_check_configuration": lambda f: f(b"bogus:1", buffer, ctypes.c_size_t(4096)),
    "gruyere_lifetime_push": lambda f: f(1),
    "gruyere_lifetime_pop": lambda f: f(),
    "gruyere_mark_phase": lambda f: f(1),
    "gruyere_mark_step": lambda f: f(),
    "gruyere_close": lambda f: f(),
    "gruyere_trim": lambda f: f(),
    "gruyere_stats": lambda f: f(0, buffer),
    "gruyere_dump": lambda f: f(b"/dev/null"),
    "gruyere_validate": lambda f: f(),
    "gruyere_torch_stats": lambda f: f(0, buffer),
    "gruyere_reset_peaks": lambda f: f(0),
    "gruyere_reset_accumulated": lambda f: f(0),
    "gruyere_capture_pools": lambda f: f(
        0, buffer, ctypes.c_uint32(0), ctypes.byref(ctypes.c_uint32(0))
    ),
    "gruyere_snapshot": lambda f: f(0),
    "gruyere_snapshot_free": lambda f: f(None),
    "gruyere_history_start": lambda f: f(ctypes.c_uint64(10), 0),
    "gruyere_history_stop": lambda f: f(),
    "gruyere_history_context": lambda f: f(ctypes.c_uint64(0)),
    "gruyere_history": lambda f: f(),
    "gruyere_history_free": lambda f: f(None),
    "gruyere_latest_out_of_memory": lambda f: f(buffer, ctypes.c_size_t(40)),
    "gruyere_on_alert": lambda f: f(None, None),
    "gruyere_next_alert": lambda f: f(buffer, ctypes.c_uint32(0)),
    "gruyere_alert_threshold": lambda f: f(ctypes.c_uint64(0), buffer, ctypes.c_size_t(40)),
    "gruyere_tag": lambda f: f(pointer, ctypes.c_uint8(3)),
    "gruyere_checkpoint": lambda f: f(),
    "gruyere_last_error": lambda f: f(buffer, ctypes.c_size_t(4096)),
    "gruyere_pool_create": lambda f: f(b"pool", 0, zero64, zero64, ctypes.byref(key)),
    "gruyere_pool_enter": lambda f: f(key),
    "gruyere_pool_leave": lambda f: f(key),
    "gruyere_pool_release": lambda f: f(key, None),
    "gruyere_pool_destroy": lambda f: f(key, None),
    "gruyere_pool_stats": lambda f: f(key, buffer),
    "gruyere_pool_blocks": lambda f: f(
        key, None, ctypes.c_uint32(0), ctypes.byref(ctypes.c_uint32(0))
    ),
    "gruyere_blame_begin": lambda f: f(None),
    "gruyere_blame_module": lambda f: f(pointer, None, b"layer"),
    "gruyere_blame_forget": lambda f: f(pointer),
    "gruyere_blame_cell": lambda f: f(b"/tmp/ipykernel_1/2.py", 3),
    "gruyere_blame_end": lambda f: f(),
    "gruyere_blame_optimizer": lambda f: f(),
    "gruyere_keep_record": lambda f: f(),
    "gruyere_native_table": by_table,
    "gruyere_version": lambda f: f(),
    "gruyere_driver_door": lambda f: f(ctypes.c_uint32(1)),
}
names = sys.argv[2].split(",")
assert sorted(calls) == names, set(calls) ^ set(names)
library.gruyere_malloc.restype = ctypes.c_void_p
for _ in range(3):
    answers = {name: calls[name](getattr(library, name)) for name in names}
assert answers["gruyere_malloc"] is None
for name in (
    "stream_lasts",
    "stats",
    "tag",
    "pool_create",
    "pool_enter",
    "pool_leave",
    "pool_release",
    "pool_destroy",
    "pool_stats",
    "pool_blocks",
    "capture_pools",
):
    assert ctypes.c_int32(answers["gruyere_" + name]).value < 0, name
assert answers["gruyere_next_alert"] == 0
print("done")
"""


def exported():
    """The C functions that the library exports."""
    table = subprocess.run(
        ["nm", "-D", "--defined-only", GRUYERE], check=True, capture_output=True, text=True
    ).stdout
    return sorted(re.findall(r" T (gruyere_\w+)", table))


def test_every_entry_answers_without_a_driver():
    ran = subprocess.run(
        [sys.executable, "-c", CALLS, GRUYERE, ",".join(exported())],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "done"
    errors = [line for line in ran.stderr.splitlines() if "ERROR" in line and "libcuda" in line]
    assert len(errors) == 1, ran.stderr
    assert "panicked" not in ran.stderr
