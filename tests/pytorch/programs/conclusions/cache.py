"""A mask is kept for each length that comes, and there is always another."""

import torch

from common import Training, is_killed

training = Training()
masks = {}


def mask(length):
    if length not in masks:
        masks[length] = torch.ones(length, length, device="cuda")  # the suspect
    return masks[length]


for step in range(24):
    mask(2048 + 64 * (step * 7 % 24))
    training.step()
is_killed()
