"""A world model: trains on sequences, then imagines rollouts whose states stay (Dreamer)."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


class RSSM(nn.Module):
    def __init__(self, d=600, z=1024):
        super().__init__()
        self.cell = nn.GRUCell(d, d)
        self.inp = nn.Linear(z + 6, d)
        self.post = nn.Linear(d + 512, z)
        self.prior = nn.Linear(d, z)
        self.rew = nn.Sequential(nn.Linear(d + z, 400), nn.ELU(), nn.Linear(400, 1))


m = RSSM().cuda()
actor = nn.Sequential(nn.Linear(1624, 400), nn.ELU(), nn.Linear(400, 6)).cuda()
o1 = torch.optim.Adam(m.parameters())
o2 = torch.optim.Adam(actor.parameters())
for _ in recorder.steps(6):
    e = torch.randn(50, 50, 512, device="cuda")
    a = torch.randn(50, 50, 6, device="cuda")
    h, z, states, loss = (
        torch.zeros(50, 600, device="cuda"),
        torch.zeros(50, 1024, device="cuda"),
        [],
        0,
    )
    for t in range(50):
        h = m.cell(F.elu(m.inp(torch.cat([z, a[t]], -1))), h)
        z = torch.softmax(m.post(torch.cat([h, e[t]], -1)).view(50, 32, 32), -1).flatten(1)
        loss = loss + (z - torch.softmax(m.prior(h), -1)).pow(2).mean()
        states.append(torch.cat([h, z], -1))
    o1.zero_grad()
    loss.backward()
    o1.step()
    s = torch.stack(states).detach().flatten(0, 1)
    h, z = s[:, :600], s[:, 600:]
    dream = []
    for t in range(15):
        act = torch.tanh(actor(torch.cat([h, z], -1)))
        h = m.cell(F.elu(m.inp(torch.cat([z, act], -1))), h)
        z = torch.softmax(m.prior(h).view(-1, 32, 32), -1).flatten(1)
        dream.append(torch.cat([h, z], -1))
    value = m.rew(torch.stack(dream)).mean()
    o2.zero_grad()
    (-value).backward()
    o2.step()
    recorder.step()
