"""Tensors that outlive main: in globals, in a cycle, in an exit handler, and in what C++ destroys
last."""

import atexit
import sys

import torch

import gpu

held_by_handler = []


def last_handler():
    # Registered first, so it runs last.
    held_by_handler.clear()
    print("handler", flush=True)


atexit.register(last_handler)
gpu.install()


class Node:
    pass


global_tensor = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
cycle = Node()
cycle.me, cycle.tensor = cycle, torch.empty(1000, dtype=torch.uint8, device="cuda")
held_by_handler.append(torch.empty(5 << 20, dtype=torch.uint8, device="cuda"))
sys.never_freed = torch.empty(1, device="cuda")
a = torch.randn(64, 64, device="cuda", requires_grad=True)
(a @ a).sum().backward()
