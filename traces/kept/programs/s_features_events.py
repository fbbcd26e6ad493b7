"""Features of clips: copies run two batches ahead with events and without record_stream, the list
of batches in flight keeps them alive; features at two levels are kept."""

import recorder
import torch
from torch import nn

copies, main = torch.cuda.Stream(), torch.cuda.current_stream()
net1 = nn.Sequential(
    nn.Conv3d(3, 48, (3, 7, 7), (1, 4, 4), (1, 3, 3)),
    nn.ReLU(),
    nn.Conv3d(48, 128, 3, (2, 2, 2), 1),
    nn.ReLU(),
).cuda()
net2 = nn.Sequential(nn.Conv3d(128, 384, 3, 2, 1), nn.ReLU()).cuda()
flight, kept = [], []


def launch():
    host = torch.zeros(8, 3, 16, 150, 150).pin_memory()
    with torch.cuda.stream(copies):
        x = host.cuda(non_blocking=True)
        flight.append((x, copies.record_event()))


with torch.inference_mode():
    launch(), launch()
    for _ in recorder.steps(56):
        launch()
        x, event = flight[0]
        main.wait_event(event)
        low = net1(x)
        high = net2(low)
        kept.append((low.mean(2), high.half()))
        done = main.record_event()
        copies.wait_event(done)
        flight.pop(0)
        recorder.step()
