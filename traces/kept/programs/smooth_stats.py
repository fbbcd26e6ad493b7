"""Calibration as SmoothQuant does it: of every linear layer the largest of each channel, and of
some the inputs themselves, over texts of varied lengths."""

import recorder
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(
    768, 12, 3072, activation="gelu", batch_first=True, norm_first=True, dropout=0
)
body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().train()
largest, inputs = {}, {}


def watch(name):
    def hook(_, given, __):
        x = given[0].detach().flatten(0, -2)
        top = x.abs().amax(0)
        largest[name] = torch.maximum(largest[name], top) if name in largest else top
        if name.endswith("0.linear2") or name.endswith("5.linear1"):
            inputs.setdefault(name, []).append(x[::4].half())

    return hook


for name, module in body.named_modules():
    if isinstance(module, nn.Linear) and "linear" in name:
        module.register_forward_hook(watch(name))
words = nn.Embedding(30_000, 768).cuda()
with torch.no_grad():
    for _ in recorder.steps(64):
        body(words(recorder.blank(4, recorder.draw.randrange(64, 512), high=30_000)))
        recorder.step()
scales = {k: v.clamp(min=1e-5).sqrt() for k, v in largest.items()}
