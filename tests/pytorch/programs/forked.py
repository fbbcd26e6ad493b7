"""DataLoader workers that inherit CUDA tensors, use none, and free some."""

import gc
import os

import torch
from torch.utils.data import DataLoader, Dataset

import gpu

gpu.install()
kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(20)]


class Numbers(Dataset):
    def __init__(self):
        self.inherited = kept

    def __len__(self):
        return 64

    def __getitem__(self, index):
        # The child's copy of the list: dropping a tensor there runs the allocator's free in the
        # child.
        if self.inherited:
            self.inherited.pop()
            gc.collect()
        return torch.full((4,), index)


loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
total = sum(int(batch.sum()) for _ in range(2) for batch in loader)
assert len(kept) == 20
gpu.check_books(seen=20 << 20)

# A child that runs on to a normal exit, with everything that Python does there.
child = os.fork()
if child == 0:
    kept.clear()
    gc.collect()
    if gpu.library:
        gpu.library.gruyere_trim()
        gpu.library.gruyere_malloc.restype = gpu.ctypes.c_void_p
        assert not gpu.library.gruyere_malloc(gpu.ctypes.c_ssize_t(4096), 0, None)
    raise SystemExit(7)
_, status = os.waitpid(child, 0)
gpu.check_books(seen=20 << 20)
later = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
gpu.check_books(seen=21 << 20)
with open("/proc/self/stat") as stat:
    started = stat.read().rsplit(") ", 1)[1].split()[19]
# Others of the same number may have left theirs, and a number is part of longer ones.
mine = f"-{os.getpid()}-{started}-"
records = [
    name
    for name in os.listdir(os.environ["GRUYERE_RECORD_DIR"])
    if "gruyere" in name and mine in name
]
del later
kept.clear()
gpu.check_nothing_is_left()
gpu.report(total=total, child=os.waitstatus_to_exitcode(status), records=len(records))
