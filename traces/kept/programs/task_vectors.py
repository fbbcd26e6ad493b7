"""Task arithmetic: fine-tunes one decoder for each of several tasks and keeps the difference of the
weights in bfloat16; then merged models are measured, whose logits are kept."""

import copy

import recorder
import torch
from torch import nn

WIDTH, WORDS = 800, 8003
layer = nn.TransformerEncoderLayer(
    WIDTH, 10, 3200, activation="gelu", batch_first=True, norm_first=True
)
base = nn.Sequential(
    nn.Embedding(WORDS, WIDTH),
    nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
    nn.Linear(WIDTH, WORDS),
).cuda()
vectors, logits = [], []
for _ in range(7):
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in recorder.steps(4):
        x = recorder.blank(
            recorder.draw.randrange(4, 17), recorder.draw.randrange(60, 200), high=WORDS
        )
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step()
    with torch.no_grad():
        vectors.append(
            [(new - old).bfloat16() for new, old in zip(model.parameters(), base.parameters())]
        )
    del model, optimizer, loss
with torch.no_grad():
    merged = copy.deepcopy(base)
    for scale in recorder.steps(10):
        for index, p in enumerate(merged.parameters()):
            p.copy_(list(base.parameters())[index] + scale * 0.1 * sum(v[index] for v in vectors))
        logits.append(merged(recorder.blank(4, 101, high=WORDS)).half())
        recorder.step()
