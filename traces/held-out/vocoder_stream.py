"""Speech synthesis: a recurrent acoustic model speaks sentences of any length, a vocoder turns
them into waves by chunks."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(61)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 512)
        self.convs = nn.Sequential(
            *[
                m
                for _ in range(3)
                for m in (nn.Conv1d(512, 512, 5, padding=2), nn.BatchNorm1d(512), nn.ReLU())
            ]
        )
        self.encoder = nn.LSTM(512, 256, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.attend = nn.LSTMCell(256 + 512, 1024)
        self.q, self.k, self.v = nn.Linear(1024, 128), nn.Linear(512, 128), nn.Linear(128, 1)
        self.decode = nn.LSTMCell(1024 + 512, 1024)
        self.out = nn.Linear(1024 + 512, 80)

    def forward(self, phones, frames):
        b = phones.shape[0]
        x = self.convs(self.embed(phones).transpose(1, 2)).transpose(1, 2)
        memory, _ = self.encoder(x)
        keys = self.k(memory)
        frame, context = memory.new_zeros(b, 80), memory.new_zeros(b, 512)
        s1 = s2 = None
        spoken = []
        for _ in range(frames):
            s1 = self.attend(torch.cat([self.prenet(frame), context], 1), s1)
            weights = self.v(torch.tanh(self.q(s1[0])[:, None] + keys)).softmax(1)
            context = (weights * memory).sum(1)
            s2 = self.decode(torch.cat([s1[0], context], 1), s2)
            frame = self.out(torch.cat([s2[0], context], 1))
            spoken.append(frame)
        return torch.stack(spoken, 2)


class ResBlock(nn.Module):
    def __init__(self, c, kernel):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(c, c, kernel, dilation=d, padding=d * (kernel - 1) // 2) for d in (1, 3, 5)
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Conv1d(80, 512, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(512 >> i, 256 >> i, 2 * u, u, u // 2)
            for i, u in enumerate((8, 8, 2, 2))
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(256 >> i, k) for k in (3, 7, 11)) for i in range(4)
        )
        self.post = nn.Conv1d(32, 1, 7, padding=3)

    def forward(self, mel):
        x = self.pre(mel)
        for up, blocks in zip(self.ups, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


acoustic, vocoder = Acoustic().cuda().eval(), Vocoder().cuda().eval()

for request in recorder.steps(10):
    with torch.inference_mode():
        phones = rng.randrange(15, 160)
        frames = int(phones * rng.uniform(2.0, 3.5))
        mel = acoustic(torch.zeros(rng.choice((1, 1, 2)), phones, dtype=torch.long).cuda(), frames)
        audio = []
        for start in range(0, frames, 96):
            part = mel[:, :, max(0, start - 8) : start + 104]
            wave = vocoder(part)
            audio.append(
                wave[:, 0, min(start, 8) * 256 :][:, : 96 * 256].mul(32767).to(torch.int16).cpu()
            )
        audio = torch.cat(audio, 1)
    recorder.step()
