"""A server with prompts on one stream and the writing of tokens on another: the caches that a
prompt made are handed over, grow by concatenation and stay until the conversation ends."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS = 1536, 9
layers = [
    (
        nn.Linear(WIDTH, 3 * WIDTH).half().cuda(),
        nn.Linear(WIDTH, WIDTH).half().cuda(),
        nn.Linear(WIDTH, 4096).half().cuda(),
        nn.Linear(4096, WIDTH).half().cuda(),
    )
    for _ in range(LAYERS)
]
embed = nn.Embedding(25_000, WIDTH).half().cuda()
prompts, tokens = torch.cuda.Stream(), torch.cuda.Stream()
for stream in (prompts, tokens):
    stream.wait_stream(torch.cuda.current_stream())


def run(x, caches):
    for index, (qkv, o, up, down) in enumerate(layers):
        q, k, v = qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, 12, 128)).permute(2, 0, 3, 1, 4)
        if caches[index]:
            k, v = torch.cat([caches[index][0], k], 2), torch.cat([caches[index][1], v], 2)
        else:
            k, v = k.contiguous(), v.contiguous()
        caches[index] = (k, v)
        x = x + o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + down(F.silu(up(F.layer_norm(x, (WIDTH,)))))
    return x[:, -1:]


talks = []
with torch.inference_mode():
    for step in recorder.steps(90):
        if step % 3 == 0:
            with torch.cuda.stream(prompts):
                caches = [None] * LAYERS
                x = run(
                    embed(recorder.blank(1, recorder.draw.randrange(100, 2200), high=25_000)),
                    caches,
                )
                talks.append([x, caches, recorder.draw.randrange(15, 80)])
            tokens.wait_stream(prompts)
            for tensor in [x, *(t for pair in caches for t in pair)]:
                tensor.record_stream(tokens)
        with torch.cuda.stream(tokens):
            for talk in recorder.draw.sample(talks, min(3, len(talks))):
                talk[0], talk[2] = run(talk[0], talk[1]), talk[2] - 3
        talks = [talk for talk in talks if talk[2] > 0]
        recorder.step()
