"""A network in four stages, each with a stream of its own, run by micro-batches as in GPipe."""

import recorder
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.depth = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x):
        y = self.depth(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


stages = [
    nn.Sequential(nn.Conv2d(3, 96, 4, 4), *[Block(96) for _ in range(3)]),
    nn.Sequential(nn.Conv2d(96, 192, 2, 2), *[Block(192) for _ in range(3)]),
    nn.Sequential(nn.Conv2d(192, 384, 2, 2), *[Block(384) for _ in range(9)]),
    nn.Sequential(
        nn.Conv2d(384, 768, 2, 2),
        *[Block(768) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(768, 1000),
    ),
]
stages = [s.cuda() for s in stages]
streams = [torch.cuda.Stream() for _ in stages]
optimizers = [torch.optim.AdamW(s.parameters(), lr=4e-3, foreach=True) for s in stages]
MICRO = 4


def forward(batch, labels):
    """Clock by clock; the activation of a micro-batch goes on to the next stage's stream."""
    inputs, outputs = {}, {}
    for clock in range(MICRO + len(stages) - 1):
        for s in range(len(stages)):
            m = clock - s
            if not 0 <= m < MICRO:
                continue
            stream = streams[s]
            if s == 0:
                stream.wait_stream(torch.cuda.default_stream())
                x = batch[m]
            else:
                stream.wait_event(outputs[s - 1, m][1])
                x = outputs[s - 1, m][0].detach().requires_grad_()
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                y = stages[s](x)
                if s == len(stages) - 1:
                    y = F.cross_entropy(y, labels[m]) / MICRO
                event = torch.cuda.Event()
                event.record(stream)
            inputs[s, m], outputs[s, m] = x, (y, event)
    return inputs, outputs


for step in recorder.steps(8):
    batch = torch.zeros(16, 3, 160, 160).cuda().chunk(MICRO)
    labels = torch.zeros(16, dtype=torch.long).cuda().chunk(MICRO)
    inputs, outputs = forward(batch, labels)
    ready = {}
    for m in reversed(range(MICRO)):
        for s in reversed(range(len(stages))):
            with torch.cuda.stream(streams[s]):
                y = outputs.pop((s, m))[0]
                if s == len(stages) - 1:
                    y.backward()
                else:
                    streams[s].wait_event(ready[s + 1, m])
                    g = inputs.pop((s + 1, m)).grad
                    g.record_stream(streams[s])
                    y.backward(g)
                ready[s, m] = streams[s].record_event()
    for s, optimizer in enumerate(optimizers):
        with torch.cuda.stream(streams[s]):
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.default_stream().wait_stream(streams[s])
    recorder.step()
