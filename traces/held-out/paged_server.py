"""A decoder server with a paged cache: requests join and leave the batch while others go on."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(2024)
VOCAB, DIM, HEADS, KV, LAYERS, HIDDEN = 50000, 1536, 12, 4, 16, 4096
HEAD, PAGE, PAGES = DIM // HEADS, 16, 5000


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.o = (
            nn.Linear(DIM, (HEADS + 2 * KV) * HEAD, bias=False),
            nn.Linear(DIM, DIM, bias=False),
        )
        self.gate_up, self.down = (
            nn.Linear(DIM, 2 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, DIM, bias=False),
        )

    def forward(self, x, slots, attend):
        q, k, v = self.qkv(self.n1(x)).view(x.shape[0], -1, HEAD).split((HEADS, KV, KV), 1)
        pool = cache[self.number]
        pool[0].index_copy_(0, slots, k)
        pool[1].index_copy_(0, slots, v)
        x = x + self.o(attend(q, k, v, pool))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    embed, norm, head = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
    layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
    cache = [torch.zeros(2, PAGES * PAGE, KV, HEAD) for _ in range(LAYERS)]
free = list(range(PAGES))


class Request:
    def __init__(self):
        self.prompt, self.left = rng.randrange(20, 1500), rng.randrange(5, 120)
        self.length, self.pages = 0, []

    def grow(self, count):
        slots = []
        for at in range(self.length, self.length + count):
            if at // PAGE == len(self.pages):
                self.pages.append(free.pop())
            slots.append(self.pages[at // PAGE] * PAGE + at % PAGE)
        self.length += count
        return slots


@torch.inference_mode()
def prefill(requests):
    slots = torch.tensor(sum((r.grow(r.prompt) for r in requests), [])).cuda()
    lengths = [r.prompt for r in requests]

    def attend(q, k, v, pool):
        parts = []
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
            a, b, c = (z.transpose(0, 1)[None] for z in (a, b, c))
            parts.append(
                F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[
                    0
                ].transpose(0, 1)
            )
        return torch.cat(parts).flatten(1)

    x = embed(torch.randint(VOCAB, (len(slots),)).cuda())
    for layer in layers:
        x = layer(x, slots, attend)
    last = torch.tensor(lengths).cumsum(0) - 1
    return head(norm(x[last.cuda()])).argmax(-1)


@torch.inference_mode()
def decode(requests):
    slots = torch.tensor([r.grow(1)[0] for r in requests]).cuda()
    most = max(len(r.pages) for r in requests)
    table = torch.tensor([r.pages + [0] * (most - len(r.pages)) for r in requests]).cuda()
    lengths = torch.tensor([r.length for r in requests]).cuda()
    index = (table[:, :, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
    mask = (torch.arange(index.shape[1], device="cuda")[None] < lengths[:, None])[:, None, None]

    def attend(q, k, v, pool):
        k, v = pool[0][index].transpose(1, 2), pool[1][index].transpose(1, 2)
        y = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)
        return y.flatten(1)

    x = embed(torch.randint(VOCAB, (len(requests),)).cuda())
    for layer in layers:
        x = layer(x, slots, attend)
    return torch.multinomial((head(norm(x)).float() / 0.7).softmax(-1) + 1e-9, 1).cpu()


running = []
for step in recorder.steps(30):
    arriving = [Request() for _ in range(rng.choice((0, 0, 1, 2, 3)))] or (
        [] if running else [Request()]
    )
    if arriving and len(running) < 24:
        prefill(arriving)
        running += arriving
    for _ in range(4):
        decode(running)
        for r in running:
            r.left -= 1
            if r.left <= 0:
                free.extend(r.pages)
        running = [r for r in running if r.left > 0] or [Request()]
        if running[0].length == 0:
            prefill(running)
    recorder.step()
