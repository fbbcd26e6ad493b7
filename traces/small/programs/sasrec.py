"""Recommendation, training: what users did last, through two layers of attention, against sampled
things that they did not do; tables of items and users with Adagrad."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

ITEMS, USERS, WIDTH = 600_000, 200_000, 96

items, users = nn.Embedding(ITEMS, WIDTH).cuda(), nn.Embedding(USERS, WIDTH).cuda()
places = nn.Embedding(200, WIDTH).cuda()
layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True)
body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
dense = torch.optim.Adam([*body.parameters(), *places.parameters()], lr=1e-3)
tables = torch.optim.Adagrad([*items.parameters(), *users.parameters()], lr=1e-2)
for index in recorder.steps(8):
    count, length = recorder.draw.randrange(128, 600), recorder.draw.randrange(20, 120)
    history, who = recorder.blank(count, length, high=ITEMS), recorder.blank(count, high=USERS)
    x = items(history) + places(torch.arange(length, device="cuda")) + users(who)[:, None]
    mask = nn.Transformer.generate_square_subsequent_mask(length, device="cuda")
    x = body(x, mask, is_causal=True)
    wrong = items(recorder.blank(count, 64, high=ITEMS))
    scores = torch.einsum("blw,bnw->bln", x, wrong)
    right = (x * items(history)).sum(-1, keepdim=True)
    loss = F.cross_entropy(torch.cat([right, scores], -1).flatten(0, 1), history.flatten() * 0)
    for optimizer in (dense, tables):
        optimizer.zero_grad()
    loss.backward()
    for optimizer in (dense, tables):
        optimizer.step()
    if index % 4 == 3:
        with torch.no_grad():
            for part in x[:, -1].split(64):
                (part @ items.weight.t()).topk(100)[1].cpu()
    recorder.step()
