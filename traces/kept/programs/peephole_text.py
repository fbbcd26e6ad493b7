"""A character model with peepholes, trained by truncated backpropagation; the loss of every
character and the last state of every batch are kept for a report."""

import recorder
import torch
from torch import nn

WIDTH, LETTERS = 256, 205
embed, gates, head = (
    nn.Embedding(LETTERS, 64).cuda(),
    nn.Linear(64 + WIDTH, 4 * WIDTH).cuda(),
    nn.Linear(WIDTH, LETTERS).cuda(),
)
peep = nn.Parameter(torch.zeros(3, WIDTH, device="cuda"))
optimizer = torch.optim.Adam(
    [*embed.parameters(), *gates.parameters(), *head.parameters(), peep], lr=2e-3
)
h = c = torch.zeros(77, WIDTH, device="cuda")
losses, states = [], []
for _ in recorder.steps(70):
    text, outs = recorder.blank(25, 77, high=LETTERS), []
    for letter in text[:-1]:
        i, f, g, o = gates(torch.cat([embed(letter), h], 1)).chunk(4, 1)
        c = (f + peep[0] * c).sigmoid() * c + (i + peep[1] * c).sigmoid() * g.tanh()
        h = (o + peep[2] * c).sigmoid() * c.tanh()
        outs.append(head(h))
    loss = nn.functional.cross_entropy(torch.cat(outs), text[1:].flatten(), reduction="none")
    optimizer.zero_grad()
    loss.mean().backward()
    optimizer.step()
    h, c = h.detach(), c.detach()
    losses.append(loss.detach())
    states.append(torch.stack([h, c]))
    recorder.step()
