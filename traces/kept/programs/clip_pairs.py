"""Embeddings of pictures and captions for a data filter: both towers, the two vectors and their
likeness are kept for each pair."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

layer = nn.TransformerEncoderLayer(
    192, 3, 768, activation="gelu", batch_first=True, norm_first=True
)
vision = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval().half().cuda()
text = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval().half().cuda()
patch, words = nn.Conv2d(3, 192, 32, 32).half().cuda(), nn.Embedding(20_000, 192).half().cuda()
kept = []
with torch.no_grad():
    for _ in recorder.steps(150):
        count = recorder.draw.randrange(20, 48)
        x = patch(recorder.blank(count, 3, 192, 192, dtype=torch.half)).flatten(2).transpose(1, 2)
        a = F.normalize(vision(x).float(), dim=-1)
        b = F.normalize(text(words(recorder.blank(count, 32, high=20_000))).float().mean(1), dim=-1)
        kept.append((a[:, ::4].contiguous(), b, (a.mean(1) * b).sum(1)))
        recorder.step()
