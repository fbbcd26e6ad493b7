"""Speech recognition: a small Conformer trained with CTC over batches of utterances bucketed by
length."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(3)
DIM = 256


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.expand = nn.Conv1d(DIM, 2 * DIM, 1)
        self.depth = nn.Conv1d(DIM, DIM, 31, padding=15, groups=DIM)
        self.bn = nn.BatchNorm1d(DIM)
        self.back = nn.Conv1d(DIM, DIM, 1)

    def forward(self, x):
        y = F.glu(self.expand(self.norm(x).transpose(1, 2)), dim=1)
        return self.back(F.silu(self.bn(self.depth(y)))).transpose(1, 2)


def feed_forward():
    return nn.Sequential(
        nn.LayerNorm(DIM),
        nn.Linear(DIM, 4 * DIM),
        nn.SiLU(),
        nn.Dropout(0.1),
        nn.Linear(4 * DIM, DIM),
        nn.Dropout(0.1),
    )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff1, self.ff2, self.conv = feed_forward(), feed_forward(), Conv()
        self.norm, self.last = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, dropout=0.1, batch_first=True)

    def forward(self, x, padding):
        x = x + 0.5 * self.ff1(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.conv(x)
        return self.last(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    def __init__(self, layers=8, vocabulary=512):
        super().__init__()
        self.sub = nn.Sequential(
            nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU()
        )
        self.lin = nn.Linear(64 * 20, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(DIM, vocabulary)

    def forward(self, features, lengths):
        x = self.sub(features.unsqueeze(1))
        b, c, t, f = x.shape
        x = self.lin(x.transpose(1, 2).reshape(b, t, c * f))
        padding = torch.arange(t, device=x.device)[None] >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(x).log_softmax(-1)


def spec_augment(x):
    x = x.clone()
    for _ in range(2):
        f = rng.randrange(0, 60)
        x[:, :, f : f + rng.randrange(1, 20)] = 0
        t = rng.randrange(0, x.shape[1] - 40)
        x[:, t : t + rng.randrange(1, 40)] = 0
    return x


model = Conformer().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), foreach=True)
window = torch.hann_window(400).cuda()
mel = torch.zeros(201, 80).cuda()
utterances = sorted(rng.uniform(2, 16) for _ in range(400))
batches, i = [], 0
while i < len(utterances):
    n = max(2, int(40 / utterances[min(i + 8, len(utterances) - 1)]))
    batches.append(utterances[i : i + n])
    i += n
rng.shuffle(batches)

for step in recorder.steps(18):
    seconds = batches[step % len(batches)]
    samples = [int(s * 16000) for s in seconds]
    wave = torch.zeros(len(samples), max(samples)).cuda()
    with torch.no_grad():
        spectrum = (
            torch.stft(wave, 512, 160, 400, F.pad(window, (0, 0)), return_complex=True)
            .abs()
            .square()
        )
        spectrum = spectrum[:, :201].transpose(1, 2)
        features = torch.log(spectrum @ mel + 1e-6)
        features = spec_augment(features)
    frames = [min(features.shape[1], n // 160) // 4 for n in samples]
    words = [max(4, int(s * 3)) for s in seconds]
    targets = torch.randint(1, 512, (len(words), max(words))).cuda()
    out = model(features, torch.tensor(frames).cuda())
    loss = F.ctc_loss(
        out.transpose(0, 1), targets, torch.tensor(frames), torch.tensor(words), zero_infinity=True
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    recorder.step()
