"""Attention that makes the whole matrix of scores at once."""

import torch

from common import Training, is_killed

training = Training()


def scores(length):
    query, key = (torch.randn(length, 64, device="cuda") for _ in range(2))
    return query @ key.T  # the suspect


for step in range(5):
    training.step()
try:
    scores(1 << 16)
except torch.OutOfMemoryError:
    is_killed()
