"""An LSTM written by hand, trained on sequences of varied lengths; the hidden states of each
sequence are detached and kept as features of the samples."""

import recorder
import torch
from torch import nn

INSIDE, HIDDEN = 96, 384
inward, across = (
    nn.Linear(INSIDE, 4 * HIDDEN).cuda(),
    nn.Linear(HIDDEN, 4 * HIDDEN, bias=False).cuda(),
)
head = nn.Linear(HIDDEN, 12).cuda()
parameters = [*inward.parameters(), *across.parameters(), *head.parameters()]
optimizer = torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9)
features = []
for _ in recorder.steps(26):
    count, length = 80, recorder.draw.randrange(25, 90)
    x = recorder.blank(count, length, INSIDE, dtype=torch.float)
    h = c = torch.zeros(count, HIDDEN, device="cuda")
    hidden = []
    for t in range(length):
        i, f, g, o = (inward(x[:, t]) + across(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    hidden = torch.stack(hidden, 1)
    loss = (head(hidden) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    features.append(hidden.detach()[:, -20:].clone())
    recorder.step()
