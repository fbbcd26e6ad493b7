"""Adapters by the hundred: one decoder of 0.3 billion parameters serves 150 tasks, each with its
LoRA weights of some rank, which are loaded when they are asked for and put out when the room for
them (100) is full."""

import collections

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, DEPTH, HEADS, TASKS, ROOM = 1024, 24, 16, 150, 100


def weights(*shape):
    return torch.zeros(shape, dtype=torch.half).cuda()


base = nn.ModuleDict()
for index in range(DEPTH):
    for name, shape in (
        ("q", (WIDTH, WIDTH)),
        ("k", (WIDTH, WIDTH)),
        ("v", (WIDTH, WIDTH)),
        ("o", (WIDTH, WIDTH)),
        ("up", (WIDTH, 4 * WIDTH)),
        ("down", (4 * WIDTH, WIDTH)),
    ):
        base[f"{name}{index}"] = nn.Linear(*shape, bias=False)
base["words"] = nn.Embedding(32000, WIDTH)
base = base.half().cuda().eval()


def load(task):
    """The adapters of a task: a pair for each layer's queries and values, of all for some."""
    draw = recorder.random.Random(task)
    rank, names = draw.choice((4, 8, 8, 16, 16, 32, 64)), draw.choice(("qv", "qv", "qkvo"))
    return {
        f"{name}{index}": (weights(rank, WIDTH), weights(WIDTH, rank))
        for index in range(DEPTH)
        for name in names
    }


def linear(name, x, adapter):
    y = base[name](x)
    if name in adapter:
        down, up = adapter[name]
        y = y + F.linear(F.linear(x, down), up) * 2
    return y


def answer(tokens, adapter):
    x = base["words"](tokens)
    batch, length, _ = x.shape
    for index in range(DEPTH):
        h = F.layer_norm(x, (WIDTH,))
        q, k, v = (
            linear(f"{name}{index}", h, adapter).view(batch, length, HEADS, -1).transpose(1, 2)
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"o{index}", mixed.transpose(1, 2).flatten(2), adapter)
        h = F.gelu(base[f"up{index}"](F.layer_norm(x, (WIDTH,))))
        x = x + base[f"down{index}"](h)
    return F.linear(x[:, -1], base["words"].weight)


loaded = collections.OrderedDict()
for request in recorder.steps(160):
    task = int(TASKS * recorder.draw.random() ** 1.5)
    if task not in loaded:
        if len(loaded) == ROOM:
            loaded.popitem(last=False)
        loaded[task] = load(task)
    loaded.move_to_end(task)
    # Most requests are not answered here: what is of interest is who comes and goes.
    if request % 8 == 0:
        with torch.inference_mode():
            tokens = recorder.blank(recorder.draw.randint(1, 8), recorder.draw.randrange(16, 300))
            answer(tokens, loaded[task]).argmax(-1).cpu()
    if request % 16 == 15:
        recorder.step()
