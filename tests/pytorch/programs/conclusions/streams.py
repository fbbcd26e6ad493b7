"""Batches go to a side stream that is far behind, and the host never waits for it."""

import torch

from common import MIB, Training, is_killed

training = Training(layers=2)
side = torch.cuda.Stream()


def prefetch():
    batch = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # the suspect
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 40)
        batch.add_(1)
    batch.record_stream(side)


for step in range(5):
    training.step()
for _ in range(20):
    prefetch()
is_killed()
