"""Cross-validation of a transformer for tables: five folds of two seeds, early stops, out-of-fold
predictions kept."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(555)
ROWS, NUMBERS, CATEGORIES = 30_000, 24, (12, 40, 7, 365, 90, 3)


class Table(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.w, self.b = (
            nn.Parameter(torch.randn(NUMBERS, d)),
            nn.Parameter(torch.zeros(NUMBERS, d)),
        )
        self.embed = nn.ModuleList(nn.Embedding(n, d) for n in CATEGORIES)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        layer = nn.TransformerEncoderLayer(d, 8, 256, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, x, c):
        tokens = [self.cls.expand(len(x), -1, -1), x[..., None] * self.w + self.b]
        tokens += [e(c[:, i : i + 1]) for i, e in enumerate(self.embed)]
        return self.out(self.body(torch.cat(tokens, 1))[:, 0]).squeeze(1)


x = torch.randn(ROWS, NUMBERS).cuda()
c = torch.stack([torch.randint(n, (ROWS,)) for n in CATEGORIES], 1).cuda()
y = torch.randn(ROWS).cuda()
test_x, test_c = torch.randn(8000, NUMBERS).cuda(), c[:8000].clone()
out_of_fold, tests, models = torch.zeros(ROWS).cuda(), [], []

for fold in recorder.steps(10):
    if fold % 5 == 0:
        order = list(range(ROWS))
        rng.shuffle(order)
        folds = [torch.tensor(order[i::5]).cuda() for i in range(5)]
    held = folds[fold % 5]
    rest = torch.cat([f for i, f in enumerate(folds) if i != fold % 5])
    mean, std = x[rest].mean(0), x[rest].std(0) + 1e-6
    xs = (x - mean) / std
    model = Table().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-5)
    best = None
    for epoch in range(rng.randrange(2, 5)):
        model.train()
        for part in rest[torch.randperm(len(rest), device="cuda")][: 256 * 10].split(256):
            loss = F.mse_loss(model(xs[part], c[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            p = torch.cat([model(xs[part], c[part]) for part in held.split(1024)])
        if best is None or rng.random() < 0.7:
            best = {k: v.clone() for k, v in model.state_dict().items()}
            out_of_fold[held] = p
    model.load_state_dict(best)
    with torch.no_grad():
        tests.append(
            torch.cat(
                [
                    model(a, b)
                    for a, b in zip(((test_x - mean) / std).split(2048), test_c.split(2048))
                ]
            )
        )
    models.append(model)
    recorder.step()
blend = torch.stack(tests).mean(0).cpu()
