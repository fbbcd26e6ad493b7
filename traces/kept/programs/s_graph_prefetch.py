"""Inference on sampled subgraphs, whose features are gathered on a side stream a batch ahead; the
embeddings and the attention of the edges are kept."""

import recorder
import torch
from torch import nn

gathering, main = torch.cuda.Stream(), torch.cuda.current_stream()
features = torch.zeros(900_000, 256, dtype=torch.half, device="cuda")
first, second, score = (
    nn.Linear(256, 512).half().cuda(),
    nn.Linear(512, 300).half().cuda(),
    nn.Linear(1024, 4).half().cuda(),
)
gathering.wait_stream(main)


def sample():
    nodes, edges = recorder.draw.randrange(30_000, 90_000), recorder.draw.randrange(90_000, 260_000)
    with torch.cuda.stream(gathering):
        x = features[recorder.blank(nodes, high=900_000)]
        pairs = recorder.blank(2, edges, high=nodes)
        return x, pairs, gathering.record_event()


kept, following = [], sample()
with torch.no_grad():
    for _ in recorder.steps(40):
        (x, (source, target), event), following = following, sample()
        main.wait_event(event)
        x.record_stream(main)
        source.record_stream(main)
        h = first(x).relu()
        weight = score(torch.cat([h[source], h[target]], 1)).exp()
        total = torch.zeros(len(x), 4, device="cuda", dtype=torch.half).index_add_(
            0, target, weight
        )
        weight = weight / total[target]
        h = torch.zeros_like(h).index_add_(0, target, h[source] * weight.mean(1, keepdim=True))
        kept.append((second(h), weight))
        recorder.step()
