"""A GRU cell over sensor readings, forward only: every state is kept for a probe on it."""

import recorder
import torch
from torch import nn

cell, probe = nn.GRUCell(48, 600).cuda(), nn.Linear(600, 7).cuda()
states, guesses = [], []
state = torch.zeros(150, 600, device="cuda")
with torch.no_grad():
    for _ in recorder.steps(120):
        x = recorder.blank(150, 48, dtype=torch.float)
        state = cell(x, state)
        states.append(state)
        guesses.append(probe(state).softmax(-1))
        recorder.step()
    torch.stack(guesses).mean(0).argmax(-1).cpu()
