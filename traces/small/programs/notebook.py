"""A notebook session that keeps everything: each cell's results have a name of their own, losses
keep their graphs, models are made again under the same name, and the last results stay in Out."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

Out = []


def model_of(width, depth):
    layers, inside = [], 64
    for _ in range(depth):
        layers += [nn.Linear(inside, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
        inside = width
    return nn.Sequential(*layers, nn.Linear(inside, 10)).cuda()


# In [1]: the data, and what was made of it along the way.
frame = torch.zeros(200_000, 64).cuda()
mean, deviation = frame.mean(0), frame.std(0)
normal = (frame - mean) / (deviation + 1e-6)
clipped = normal.clamp(-3, 3)
labels = recorder.blank(200_000, high=10)
recorder.step()
# In [2] to [7]: one more try each, none of which is ever deleted.
losses, history = [], {}
for number, (width, depth) in enumerate([(128, 2), (256, 3), (512, 3), (384, 6), (256, 4)]):
    model = model_of(width, depth)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(4):
        chosen = torch.randperm(200_000)[: recorder.draw.randrange(2000, 9000)].cuda()
        batch = clipped[chosen]
        output = model(batch)
        loss = F.cross_entropy(output, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The mistake that everybody has made once: the loss, not its value.
        losses.append(loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters()))
    with torch.no_grad():
        scores = model(clipped[:50_000]).softmax(-1)
    history[number] = {"model": model, "optimizer": optimizer, "scores": scores}
    Out.append(scores.max(-1))
    recorder.step()
# In [8]: a look at the data.
correlation = torch.corrcoef(normal[:20_000].t())
u, s, v = None, (normal.t() @ normal).diagonal().sqrt(), correlation.abs().sort(-1)
nearest = torch.cdist(clipped[:6000], clipped[:6000]).topk(5, largest=False)
Out.append((correlation, s, v, nearest))
recorder.step()
# In [9]: the mean of all tries, and a table of where they were wrong.
together = torch.stack([entry["scores"] for entry in history.values()]).mean(0)
table = torch.zeros(10, 10, device="cuda").index_put_(
    (labels[:50_000], together.argmax(-1)), torch.ones(50_000, device="cuda"), accumulate=True
)
Out.append(table.cpu())
recorder.step()
