"""A memory machine reads a long tape without gradients: what it addressed and its memory at each
tenth cell are kept for a picture."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

BATCH, SLOTS, WIDE = 9, 1021, 76
controller = nn.LSTMCell(10 + WIDE, 256).cuda()
heads = nn.Linear(256, 2 * (WIDE + 6) + 2 * WIDE).cuda()
memory = torch.full((BATCH, SLOTS, WIDE), 1e-6, device="cuda")
read = torch.zeros(BATCH, WIDE, device="cuda")
h = c = torch.zeros(BATCH, 256, device="cuda")
where = [torch.zeros(BATCH, SLOTS, device="cuda") for _ in range(2)]
trail, memories = [], []


def address(part, before):
    key, strength, gate, shift, sharp = part.split([WIDE, 1, 1, 3, 1], 1)
    near = F.cosine_similarity(memory, key[:, None].tanh(), dim=-1)
    w = (F.softplus(strength) * near).softmax(1)
    w = gate.sigmoid() * w + (1 - gate.sigmoid()) * before
    s = shift.softmax(1)
    w = s[:, :1] * w.roll(-1, 1) + s[:, 1:2] * w + s[:, 2:] * w.roll(1, 1)
    w = w ** (1 + F.softplus(sharp))
    return w / (w.sum(1, keepdim=True) + 1e-8)


with torch.no_grad():
    for cell in recorder.steps(150):
        h, c = controller(
            torch.cat([recorder.blank(BATCH, 10, dtype=torch.float), read], 1), (h, c)
        )
        first, second, erase, add = heads(h).split([WIDE + 6, WIDE + 6, WIDE, WIDE], 1)
        where = [address(first, where[0]), address(second, where[1])]
        memory = memory * (1 - where[1][..., None] * erase.sigmoid()[:, None])
        memory = memory + where[1][..., None] * add.tanh()[:, None]
        read = (where[0][:, None] @ memory)[:, 0]
        trail.append(torch.stack(where))
        if cell % 10 == 9:
            memories.append(memory)
        recorder.step()
