"""Control: a healthy training of an MLP with a bounded replay buffer on the device; the batch of
the last phase is too large.

cause: too_large
also: one_tensor
device: 2 GiB
ends: oom
never: no_grad|handle\.remove
"""

import os, time
from collections import deque
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.value = nn.Linear(dim, 1)
        self.policy = nn.Linear(dim, 18)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h)


def collect(net, buffer, size=16384):
    """One rollout: states, actions and returns, kept on the device."""
    with torch.no_grad():
        states = torch.randn(size, 256, device="cuda")
        policy, value = net(states)
        actions = policy.argmax(-1)
    buffer.append((states, actions, value.squeeze(-1)))


def main():
    net = Net().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=2.5e-4)
    buffer = deque(maxlen=24)                # bounded: 24 x 16 MiB
    for step in range(200):
        collect(net, buffer)
        count = 1 if step < 120 else len(buffer)         # at the end over all of the buffer at once
        states = torch.cat([b[0] for b in list(buffer)[-count:]])
        actions = torch.cat([b[1] for b in list(buffer)[-count:]])
        returns = torch.cat([b[2] for b in list(buffer)[-count:]])
        policy, value = net(states)
        loss = F.cross_entropy(policy, actions) + F.mse_loss(value.squeeze(-1), returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item(), flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
