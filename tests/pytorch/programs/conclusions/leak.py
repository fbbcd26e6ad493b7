"""64 MiB a step are kept in a list, from the fourth step on."""

import time

import torch

from common import MIB, Training, is_killed

training = Training()
seen = []


def remember():
    seen.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))  # the suspect


for step in range(24):
    if step >= 3:
        remember()
    training.step()
    # Steps take time: the timeline has a look each few milliseconds, and from one look in ten steps
    # a leak and a full queue are alike.
    time.sleep(0.01)
is_killed()
