"""A scoring server keeps the attention bias of each length of text that it has ever seen.

cause: cache
also: grows
device: 6 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)|backward
"""
import random

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

random.seed(1)


class Alibi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])
        self.register_buffer("slopes", slopes[:, None, None])
        self.biases = {}

    def forward(self, n):
        if n not in self.biases:
            place = torch.arange(n, device=self.slopes.device)
            distance = (place[None] - place[:, None]).abs()
            self.biases[n] = -self.slopes * distance  # the cause
        return self.biases[n]


class Scorer(nn.Module):
    def __init__(self, dim=512, heads=16, layers=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(32000, dim)
        self.alibi = Alibi(heads)
        self.projections = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        x = self.embedding(ids)
        bias = self.alibi(ids.shape[1])
        for project, output in zip(self.projections, self.outputs):
            q, k, v = project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + output(attend(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return self.score(x[:, -1])


scorer = Scorer().to("cuda").eval()
served = 0
while served < 3000:
    length = random.randrange(256, 2048)
    with torch.inference_mode():
        answer = scorer(torch.zeros(2, length, dtype=torch.long, device="cuda")).tolist()
    served += 1
    if served % 10 == 0:
        print(f"served {served}, last of length {length}: {answer[0]}", flush=True)
