"""Activations of a vision transformer collected by hooks at four layers, for a sparse autoencoder
that is trained on them afterwards."""

import recorder
import torch
from torch import nn

WIDTH = 576
layer = nn.TransformerEncoderLayer(
    WIDTH, 9, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True, dropout=0
)
body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().half()
patch = nn.Conv2d(3, WIDTH, 16, 16).cuda().half()
kept = {i: [] for i in (2, 5, 8, 11)}
hooks = [
    body.layers[i].register_forward_hook(
        lambda _, __, out, i=i: kept[i].append(out[:, 1:].flatten(0, 1))
    )
    for i in kept
]
with torch.no_grad():
    for _ in recorder.steps(110):
        x = patch(recorder.blank(recorder.draw.randrange(14, 25), 3, 224, 224, dtype=torch.half))
        body(x.flatten(2).transpose(1, 2))
        recorder.step()
for hook in hooks:
    hook.remove()
encoder, decoder = nn.Linear(WIDTH, 4608).cuda(), nn.Linear(4608, WIDTH).cuda()
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-4)
for x in kept[8][:20]:
    x = x.float()
    code = encoder(x).relu()
    loss = (decoder(code) - x).square().mean() + 1e-3 * code.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
