"""A model with a large vocabulary is compared with its quantised self: the full logits of each text
are kept in float32, as an evaluation written in an evening does."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS = 896, 151_936
layers = [
    tuple(
        nn.Linear(a, b, bias=False).bfloat16().cuda()
        for a, b in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4864), (4864, WIDTH))
    )
    for _ in range(12)
]
embed = nn.Embedding(WORDS, WIDTH).bfloat16().cuda()
kept = []
with torch.no_grad():
    for _ in recorder.steps(84):
        tokens = recorder.blank(1, recorder.draw.randrange(33, 246), high=WORDS)
        x = embed(tokens)
        for qkv, o, up, down in layers:
            q, k, v = qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, 14, 64)).permute(2, 0, 3, 1, 4)
            x = x + o(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            x = x + down(F.silu(up(F.rms_norm(x, (WIDTH,)))))
        logits = (F.rms_norm(x, (WIDTH,)) @ embed.weight.t()).float()
        F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()
        kept.append(logits[0])
        recorder.step()
