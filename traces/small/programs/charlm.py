"""Text, training: a language model of letters, two LSTM cells that are called letter by letter, so
that a step keeps thousands of small tensors."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

LETTERS, WIDTH, BATCH = 96, 512, 64

embedding = nn.Embedding(LETTERS, WIDTH).cuda()
cells = nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH) for _ in range(2)]).cuda()
last = nn.Linear(WIDTH, LETTERS).cuda()
weights = [*embedding.parameters(), *cells.parameters(), *last.parameters()]
optimizer = torch.optim.Adam(weights, lr=2e-3)
states = [None, None]
for _ in recorder.steps(6):
    text = recorder.blank(BATCH, recorder.draw.randrange(40, 90), high=LETTERS)
    losses = []
    for letter, following in zip(text.t()[:-1], text.t()[1:]):
        x = F.dropout(embedding(letter), 0.2)
        for index, cell in enumerate(cells):
            states[index] = cell(x, states[index])
            x = F.dropout(states[index][0], 0.2)
        losses.append(F.cross_entropy(last(x), following))
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    states = [tuple(part.detach() for part in state) for state in states]
    recorder.step()
