"""Live captions of several calls: each keeps its recurrent state, and with it all past graphs.

cause: no_grad
also: graph
device: 8 GiB
ends: killed
never: smaller batch|batch size|checkpoint|optimizer
"""

import os
import signal
from dataclasses import dataclass, field

import torch
from torch import nn


class Recognizer(nn.Module):
    def __init__(self, mels=80, width=1024, letters=64):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(mels, width), nn.GELU(), nn.LayerNorm(width))
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(2))
        self.head = nn.Linear(width, letters)

    def forward(self, sound, state):
        x = self.front(sound)  # the cause
        letters = []
        for frame in x.unbind(1):
            for i, cell in enumerate(self.cells):
                state[i] = frame = cell(frame, state[i])  # the cause
            letters.append(self.head(frame).argmax(-1))
        return torch.stack(letters, 1), state


@dataclass
class Call:
    name: str
    lines: int
    state: list = field(default_factory=list)
    text: str = ""

    def hear(self, recognizer):
        if not self.state:
            self.state = [torch.zeros(self.lines, 1024, device="cuda") for _ in range(2)]
        sound = torch.randn(self.lines, 25, 80, device="cuda")
        letters, self.state = recognizer(sound, self.state)  # the cause
        self.text += "".join(chr(96 + c) for c in letters[0].tolist())


recognizer = Recognizer().cuda().eval()
calls = [Call("board", 32), Call("support", 96), Call("all hands", 64)]
for second in range(12):
    for call in calls:
        call.hear(recognizer)
    print("second", second, [len(c.text) for c in calls], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
