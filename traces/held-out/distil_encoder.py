"""A 24-layer teacher encoder distilled into one of 6 layers, over padded batches of sentences."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(77)
VOCAB = 30522


class Encoder(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens, padding):
        x = self.norm(
            self.words(tokens) + self.places(torch.arange(tokens.shape[1], device="cuda"))
        )
        hidden = [x]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
            hidden.append(x)
        return self.head(x), hidden


with torch.device("cuda"):
    teacher = Encoder(1024, 16, 24).to(torch.bfloat16).requires_grad_(False)
    student = Encoder(512, 8, 6)
    bridge = nn.Linear(512, 1024)
teacher.train(False)
optimizer = torch.optim.AdamW([*student.parameters(), *bridge.parameters()], lr=5e-4)

for step in recorder.steps(14):
    lengths = [min(256, max(8, int(rng.gammavariate(3, 22)))) for _ in range(32)]
    longest = max(lengths)
    tokens = torch.zeros(32, longest, dtype=torch.long)
    padding = torch.ones(32, longest, dtype=torch.bool)
    for row, n in enumerate(lengths):
        padding[row, :n] = False
    tokens, padding = tokens.cuda(), padding.cuda()
    # The masked positions are known on the host.
    places = [
        r * longest + c
        for r, n in enumerate(lengths)
        for c in rng.sample(range(n), max(1, n * 15 // 100))
    ]
    places = torch.tensor(places).cuda()
    with torch.no_grad():
        wanted, deep = teacher(tokens, padding)
        wanted = wanted.flatten(0, 1)[places].float()
        deep = deep[::4]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got, hidden = student(tokens, padding)
        got = got.flatten(0, 1)[places]
        soft = (
            F.kl_div(
                F.log_softmax(got.float() / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean"
            )
            * 4
        )
        hard = F.cross_entropy(got, tokens.flatten()[places])
        match = sum(F.mse_loss(bridge(a), b) for a, b in zip(hidden, deep))
        loss = soft + hard + 0.1 * match
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step()
