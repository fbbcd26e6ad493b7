"""The validation keeps its predictions with gradients on.

cause: no_grad
device: 2GiB
ends: oom
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(8)])
        s.head = nn.Linear(1024, 100)

    def forward(s, x):
        for l in s.layers:
            x = F.relu(l(x))
        return s.head(x)


net = Net().cuda()
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def train_epoch():
    net.train()
    for i in range(4):
        x = torch.randn(2048, 1024).cuda()
        y = torch.randint(0, 100, (2048,)).cuda()
        opt.zero_grad(set_to_none=False)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()


def validate():
    net.eval()
    preds, targets = [], []
    for i in range(40):
        x = torch.randn(2048, 1024).cuda()
        y = torch.randint(0, 100, (2048,)).cuda()
        preds.append(net(x))  # the cause
        targets.append(y)
    return (torch.cat(preds).argmax(1) == torch.cat(targets)).float().mean().item()


for ep in range(3):
    train_epoch()
    print(ep, validate())
