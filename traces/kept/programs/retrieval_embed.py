"""Embeddings of passages for retrieval: mean-pooled, normalised, kept batch by batch, put together
into an index at the end, which queries are searched in."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

layer = nn.TransformerEncoderLayer(312, 12, 1200, activation="gelu", batch_first=True)
body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda().eval()
words = nn.Embedding(8192, 312).cuda()
vectors = []


def embed(count, length):
    tokens = recorder.blank(count, length, high=8192)
    mask = (tokens > -1)[..., None]
    x = body(words(tokens))
    return F.normalize((x * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)


with torch.no_grad():
    for _ in recorder.steps(160):
        vectors.append(embed(recorder.draw.choice([96, 128]), recorder.draw.randrange(12, 60)))
        recorder.step()
    index = torch.cat(vectors)
    for _ in range(10):
        (embed(64, 16) @ index.t()).topk(20)[1].cpu()
