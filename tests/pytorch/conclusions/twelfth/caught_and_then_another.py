"""A first out-of-memory is caught, and what it was of let go; soon after, another ends the program.

cause: too_large
also: grows, collects
device: 2 GiB
ends: oom
never: first
"""

import torch

rows = []


def first():
    for _ in range(64):
        rows.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))


def second():
    for _ in range(64):
        rows.append(torch.zeros(48 << 20, dtype=torch.uint8, device="cuda"))  # the cause


try:
    first()
except torch.OutOfMemoryError:
    rows.clear()
second()
