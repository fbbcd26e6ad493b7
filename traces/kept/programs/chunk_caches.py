"""Caches of keys and values of the documents' chunks, made once for an assistant, and put together
for each question; all stay on the device."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS = 2048, 16
layers = [
    tuple(
        nn.Linear(a, b, bias=False).half().cuda()
        for a, b in ((WIDTH, 3072), (WIDTH, WIDTH), (WIDTH, 5632), (5632, WIDTH))
    )
    for _ in range(LAYERS)
]
embed = nn.Embedding(32_000, WIDTH).half().cuda()


def run(x, caches):
    made = []
    for (qkv, o, up, down), cache in zip(layers, caches):
        q, k, v = qkv(F.rms_norm(x, (WIDTH,))).split([2048, 512, 512], -1)
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (q, k, v))
        made.append((k.contiguous(), v.contiguous()))
        if cache:
            k, v = (
                torch.cat([*(c[0] for c in cache), k], 2),
                torch.cat([*(c[1] for c in cache), v], 2),
            )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + o(y.transpose(1, 2).flatten(2))
        x = x + down(F.silu(up(F.rms_norm(x, (WIDTH,)))))
    return x, made


chunks, answers = [], []
with torch.inference_mode():
    for step in recorder.steps(110):
        chunks.append(
            run(
                embed(recorder.blank(1, recorder.draw.randrange(300, 1300), high=32_000)),
                [None] * LAYERS,
            )[1]
        )
        if step % 5 == 4:
            some = recorder.draw.sample(chunks, min(4, len(chunks)))
            caches = [[chunk[layer] for chunk in some] for layer in range(LAYERS)]
            answers.append(
                run(embed(recorder.blank(1, recorder.draw.randrange(10, 60), high=32_000)), caches)[
                    0
                ]
            )
        recorder.step()
