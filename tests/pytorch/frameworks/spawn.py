"""torch.multiprocessing: a process a device, started with `spawn`; results come back through a
queue."""

import json

import torch
import torch.multiprocessing as mp
from torch import nn


def work(rank, results):
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = 0
    for length in (16, 64, 32, 128):
        x = torch.randn(length, 256, device="cuda")
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    results.put(
        (
            rank,
            steps,
            {name: list(tensor.cpu().shape) for name, tensor in model.state_dict().items()},
        )
    )


def main():
    count = torch.cuda.device_count()
    results = mp.get_context("spawn").SimpleQueue()
    # Rank 0's device is used here too: parent and child are processes of their own.
    here = torch.ones(1 << 20, device="cuda")
    spawned = mp.spawn(work, (results,), nprocs=count, join=False)
    answers = [results.get() for _ in range(count)]
    while not spawned.join():
        pass
    steps = sum(steps for _, steps, _ in answers)
    ranks = sorted(rank for rank, _, _ in answers)
    print(
        json.dumps({"steps": steps, "ranks": ranks, "shapes": answers[0][2], "here": here.numel()})
    )


if __name__ == "__main__":
    main()
