"""What launchers start: a rank of several, each with a device of its own, a DataLoader with
workers, and a process that it spawns itself."""

import json
import os
import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(device):
    torch.cuda.set_device(device)
    torch.manual_seed(device)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 256)), batch_size=8, num_workers=1):
        x = x.cuda()
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def work(_, device):
    train(device)


def main():
    device = int(os.environ["LOCAL_RANK"])
    steps = train(device)
    mp.spawn(work, (device,), nprocs=1)
    # The line and its end in one write: two ranks share the pipe, and their launcher starts them
    # unbuffered, where print writes the end by itself.
    sys.stdout.write(json.dumps({"steps": steps, "world": int(os.environ["WORLD_SIZE"])}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
