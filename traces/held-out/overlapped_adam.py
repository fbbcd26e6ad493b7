"""The optimiser's step for each parameter runs on a side stream once its gradient is there."""

import recorder
import torch
import torch.nn.functional as F
from torch import nn

DIM = 768


class Mixer(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.tokens = nn.Sequential(nn.Linear(tokens, 384), nn.GELU(), nn.Linear(384, tokens))
        self.channels = nn.Sequential(nn.Linear(DIM, 3072), nn.GELU(), nn.Linear(3072, DIM))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


patch = nn.Conv2d(3, DIM, 16, 16).cuda()
body = nn.Sequential(*[Mixer(196) for _ in range(8)]).cuda()
head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 1000)).cuda()
parameters = [*patch.parameters(), *body.parameters(), *head.parameters()]
side = torch.cuda.Stream()
optimizers = {p: torch.optim.Adam([p], lr=1e-3, foreach=False) for p in parameters}


def hook(p):
    side.wait_stream(torch.cuda.current_stream())
    p.grad.record_stream(side)
    with torch.cuda.stream(side):
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=True)


for p in parameters:
    p.register_post_accumulate_grad_hook(hook)

for step in recorder.steps(12):
    x = torch.zeros(12, 3, 224, 224).pin_memory().cuda(non_blocking=True)
    y = torch.zeros(12, dtype=torch.long).pin_memory().cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        z = body(patch(x).flatten(2).transpose(1, 2))
        loss = F.cross_entropy(head(z.mean(1)), y)
    loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    recorder.step()
