"""Speech synthesis: a decoder with attention makes frames one by one, which are kept with their
alignments; then a vocoder makes sound of them, which is kept as well."""

import recorder
import torch
from torch import nn

prenet = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()).cuda()
attention, decoder = nn.LSTMCell(256 + 512, 1024).cuda(), nn.LSTMCell(1024 + 512, 1024).cuda()
query, memory_map, score, place = (
    m.cuda()
    for m in (
        nn.Linear(1024, 128),
        nn.Linear(512, 128),
        nn.Linear(128, 1),
        nn.Conv1d(2, 128, 31, padding=15),
    )
)
project = nn.Linear(1024 + 512, 81).cuda()
vocoder = nn.Sequential(
    nn.Conv1d(80, 256, 7, 1, 3),
    *[
        m
        for a, s in ((256, 8), (128, 8), (64, 4))
        for m in (nn.LeakyReLU(), nn.ConvTranspose1d(a, a // 2, 2 * s, s, s // 2))
    ],
    nn.Conv1d(32, 1, 7, 1, 3),
    nn.Tanh(),
).cuda()
sounds, alignments = [], []
with torch.no_grad():
    for _ in recorder.steps(20):
        count, length = recorder.draw.randrange(3, 9), recorder.draw.randrange(40, 160)
        memory = torch.zeros(count, length, 512, device="cuda")
        keys, frame, context = (
            memory_map(memory),
            torch.zeros(count, 80, device="cuda"),
            torch.zeros(count, 512, device="cuda"),
        )
        a = d = (torch.zeros(count, 1024, device="cuda"),) * 2
        weight = total = torch.zeros(count, length, device="cuda")
        frames, weights = [], []
        for _ in range(length * 2):
            a = attention(torch.cat([prenet(frame), context], 1), a)
            where = place(torch.stack([weight, total], 1)).transpose(1, 2)
            weight = score((query(a[0])[:, None] + keys + where).tanh())[..., 0].softmax(1)
            total, context = total + weight, (weight[:, None] @ memory)[:, 0]
            d = decoder(torch.cat([a[0], context], 1), d)
            frame = project(torch.cat([d[0], context], 1))[:, :80]
            frames.append(frame)
            weights.append(weight)
        mel = torch.stack(frames, 2)
        alignments.append(torch.stack(weights, 1))
        sounds.append((mel, vocoder(mel)))
        recorder.step()
