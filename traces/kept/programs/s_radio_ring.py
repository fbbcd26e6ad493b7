"""Radio signals in chunks on a ring of three streams: filter banks by convolution; spectrograms and
detections of each chunk are kept."""

import recorder
import torch
from torch.nn import functional as F

ring = [torch.cuda.Stream() for _ in range(3)]
filters = torch.randn(258, 1, 512, device="cuda")
smooth = torch.ones(1, 1, 9, 9, device="cuda") / 81
for stream in ring:
    stream.wait_stream(torch.cuda.current_stream())
kept = []
with torch.no_grad():
    for step in recorder.steps(96):
        stream = ring[step % 3]
        host = torch.zeros(1, 2, recorder.draw.randrange(60_000, 130_000)).pin_memory()
        with torch.cuda.stream(stream):
            x = host.cuda(non_blocking=True)
            bands = F.conv1d(x.transpose(0, 1), filters, stride=128)
            power = bands.square().view(2, 129, 2, -1).sum(2)
            power = (power + 1e-9).log10()
            floor = F.conv2d(power[:, None], smooth, padding=4)[:, 0]
            hits = (power - floor).flatten(1).topk(1500, 1)
            kept.append((power - floor, hits.values, hits.indices))
        recorder.step()
for stream in ring:
    torch.cuda.current_stream().wait_stream(stream)
