"""Speech recognition, evaluation: a stack of GRUs over strided convolutions; the log-probabilities
of every utterance are kept on the device, for decoding with several language models afterwards."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

front = nn.Sequential(
    nn.Conv1d(80, 256, 5, 2, 2), nn.GELU(), nn.Conv1d(256, 320, 5, 2, 2), nn.GELU()
).cuda()
cells = nn.ModuleList([nn.GRUCell(320, 320) for _ in range(3)]).cuda()
head = nn.Linear(320, 1031).cuda()
kept = []
with torch.inference_mode():
    for _ in recorder.steps(24):
        count, length = 8, recorder.draw.randrange(300, 1100, 10)
        x = front(recorder.blank(count, 80, length, dtype=torch.float)).permute(2, 0, 1)
        for cell in cells:
            state, out = torch.zeros(count, 320, device="cuda"), []
            for frame in x[:: 3 if cell is cells[0] else 1]:
                state = cell(frame, state)
                out.append(state)
            x = torch.stack(out)
        kept.append(F.log_softmax(head(x), -1))
        recorder.step()
