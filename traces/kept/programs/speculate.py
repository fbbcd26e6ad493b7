"""Speculative decoding: a small model drafts five tokens, a large one checks them at once, caches
of both are cut and grown; the distributions of both are kept for distillation."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WORDS = 16_003


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.width, self.embed, self.head = (
            width,
            nn.Embedding(WORDS, width),
            nn.Linear(width, WORDS),
        )
        self.parts = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(layers)
        )

    def forward(self, tokens, caches):
        x = self.embed(tokens)
        for index, (qkv, o, up, down) in enumerate(self.parts):
            q, k, v = (
                qkv(F.rms_norm(x, (self.width,))).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            )
            if caches[index] is not None:
                k, v = torch.cat([caches[index][0], k], 2), torch.cat([caches[index][1], v], 2)
            caches[index] = k, v
            x = x + o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(F.rms_norm(x, (self.width,)))))
        return self.head(x)


def cut(caches, length):
    return [(k[:, :, :length].contiguous(), v[:, :, :length].contiguous()) for k, v in caches]


small, large = Model(384, 3).bfloat16().cuda(), Model(1152, 12).bfloat16().cuda()
kept = []
with torch.inference_mode():
    first = recorder.blank(16, 330, high=WORDS)
    a, b, length = [None] * 3, [None] * 12, 330
    small(first, a), large(first, b)
    for _ in recorder.steps(56):
        token, guesses, tokens = first[:, -1:], [], []
        for _ in range(5):
            guesses.append(small(token, a)[:, -1].float().softmax(-1))
            token = guesses[-1].argmax(-1, keepdim=True).clamp(0, 0)
            tokens.append(token)
        true = large(torch.cat(tokens, 1), b).float().softmax(-1)
        length += recorder.draw.randrange(1, 6)
        a, b = cut(a, length), cut(b, length)
        kept.append((torch.stack(guesses, 1).bfloat16(), true.bfloat16()))
        recorder.step()
