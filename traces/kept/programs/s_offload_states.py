"""Hidden states of all layers leave for the host on a stream of their own; the device keeps those
of the last ten batches, and the sums of all."""

import collections

import recorder
import torch
from torch import nn

away = torch.cuda.Stream()
layers = (
    nn.ModuleList(
        [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0) for _ in range(10)]
    )
    .half()
    .cuda()
)
embed = nn.Embedding(20_000, 1024).half().cuda()
recent, host, sums = collections.deque(maxlen=10), collections.deque(maxlen=20), []
with torch.no_grad():
    for _ in recorder.steps(45):
        x, states = embed(recorder.blank(6, recorder.draw.randrange(100, 480), high=20_000)), []
        for layer in layers:
            x = layer(x)
            states.append(x)
        away.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(away):
            for state in states[::3]:
                target = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
                target.copy_(state, non_blocking=True)
                state.record_stream(away)
                host.append(target)
        recent.append(states[1::2])
        sums.append(torch.stack([s.float().mean((0, 1)) for s in states]))
        recorder.step()
