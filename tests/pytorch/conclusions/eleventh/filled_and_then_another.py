"""A function fills a list until it is refused; its error is kept, and another request has no room.

cause: too_large
device: 1 GiB
ends: oom
never: dataset|bound its queue
"""

import torch

errors = []


def fill():
    parts = []
    while True:
        parts.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))


def other(size):
    return torch.zeros(size << 20, dtype=torch.uint8, device="cuda")


try:
    fill()
except torch.OutOfMemoryError as error:
    errors.append(error)
other(700)
