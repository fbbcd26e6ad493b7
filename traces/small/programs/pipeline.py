"""A pipeline of two stages in one process, a stream each: four parts of a batch (GPipe), the first
stage's results handed over by event and record_stream; autograd runs each backward pass on the
stream of its forward pass."""

import llama
import recorder
import torch
from torch import nn
from torch.nn import functional as F

PARTS = 4


class Stage(nn.Module):
    """Half of a model."""

    def __init__(self, whole, layers, last):
        super().__init__()
        self.embedding = None if last else whole.embedding
        self.layers, self.angles = whole.layers[layers], whole.angles
        self.ends = nn.Sequential(whole.norm, whole.output) if last else nn.Identity()

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        angles = torch.arange(x.shape[1], device="cuda")[:, None] * self.angles.to("cuda")
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.ends(x)


with torch.device("cuda"):
    whole = llama.Llama(width=768, heads=12, inner=2048).to(torch.bfloat16)
stages = Stage(whole, slice(0, 4), False), Stage(whole, slice(4, 8), True)
streams = torch.cuda.Stream(), torch.cuda.Stream()
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4)
for _ in recorder.steps(5):
    tokens = recorder.blank(16, recorder.draw.randrange(256, 640, 64))
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        tokens.record_stream(stream)
    losses = []
    for part in tokens.chunk(PARTS):
        with torch.cuda.stream(streams[0]):
            between = stages[0](part)
            ready = streams[0].record_event()
        with torch.cuda.stream(streams[1]):
            streams[1].wait_event(ready)
            between.record_stream(streams[1])
            said = stages[1](between)
            losses.append(
                F.cross_entropy(said[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten())
            )
        del between, said
    for loss in losses:
        with torch.cuda.stream(streams[1]):
            (loss / PARTS).backward()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    del losses, loss, tokens
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
