"""Beam search of a translator with GRUs and attention: the states of all steps are reordered, and
the attention maps of the finished sentences kept for alignment."""

import recorder
import torch
from torch import nn

BEAMS, WIDTH, WORDS = 6, 500, 24_000
embed, cell = nn.Embedding(WORDS, WIDTH).cuda(), nn.GRUCell(2 * WIDTH, WIDTH).cuda()
encoder, key, out = (
    nn.GRU(WIDTH, WIDTH // 2, 2, bidirectional=True).cuda(),
    nn.Linear(WIDTH, WIDTH).cuda(),
    nn.Linear(2 * WIDTH, WORDS).cuda(),
)
alignments, nbest = [], []
with torch.no_grad():
    for _ in recorder.steps(22):
        count, length = recorder.draw.randrange(6, 20), recorder.draw.randrange(10, 60)
        memory = encoder(embed(recorder.blank(length, count, high=WORDS)))[0].transpose(0, 1)
        memory = memory.repeat_interleave(BEAMS, 0)
        keys, h = key(memory), memory.mean(1)
        score, maps = torch.zeros(count, BEAMS, device="cuda"), []
        token = torch.zeros(count * BEAMS, dtype=torch.long, device="cuda")
        words = token[:, None]
        for _ in range(recorder.draw.randrange(10, 40)):
            weight = (keys @ h[..., None]).softmax(1)
            seen = (weight * memory).sum(1)
            h = cell(torch.cat([embed(token), seen], 1), h)
            log = out(torch.cat([h, seen], 1)).log_softmax(-1).view(count, BEAMS, WORDS)
            score, which = (score[..., None] + log).flatten(1).topk(BEAMS, 1)
            parent = (
                ((which // WORDS).clamp(0, 0) + BEAMS * torch.arange(count, device="cuda")[:, None])
                .flatten()
                .clamp(0, 0)
            )
            token = (which % WORDS).flatten().clamp(0, 0)
            h, words = h[parent], torch.cat([words[parent], token[:, None]], 1)
            maps = [m[parent] for m in maps] + [weight[..., 0]]
        alignments.append(torch.stack(maps, 1))
        nbest.append((score, words, memory[::BEAMS]))
        recorder.step()
