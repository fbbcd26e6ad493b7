"""What the planted programs share: a small training, and the end that leaves a record."""

import os
import signal

import torch

# The phantom has no cuDNN.
torch.backends.cudnn.enabled = False
MIB = 1 << 20


class Training:
    """A model of a few layers whose steps leave nothing behind."""

    def __init__(self, layers=4, width=1024):
        sizes = [torch.nn.Linear(width, width) for _ in range(layers)]
        parts = [part for layer in sizes for part in (layer, torch.nn.GELU())]
        self.model = torch.nn.Sequential(*parts).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width = width

    def batch(self, size=1024):
        return torch.randn(size, self.width, device="cuda")

    def step(self):
        self.model(self.batch()).square().mean().backward()
        self.end_step()

    def end_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensor(bytes):
    return torch.empty(bytes, dtype=torch.uint8, device="cuda")


def is_killed():
    """As by the kernel: nothing is tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)
