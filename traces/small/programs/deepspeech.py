"""Speech, training: convolutions, five bidirectional LSTM layers and CTC on spectrograms of varied
lengths, sorted into batches of about as many frames."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

LETTERS = 29


class DeepSpeech(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.lstm = nn.LSTM(32 * 40, width, 5, batch_first=True, bidirectional=True)
        self.last = nn.Linear(2 * width, LETTERS)

    def forward(self, sound):
        x = self.front(sound[:, None]).flatten(1, 2).transpose(1, 2)
        return self.last(self.lstm(x)[0])


model = DeepSpeech().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
for _ in recorder.steps(10):
    frames = recorder.draw.randrange(200, 1500)
    count = max(2, 12000 // frames)
    sound = recorder.blank(count, 160, frames, dtype=torch.float)
    chances = F.log_softmax(model(sound), -1).transpose(0, 1)
    lengths = [recorder.draw.randrange(10, 10 + frames // 8) for _ in range(count)]
    targets = 1 + recorder.blank(count, max(lengths), high=LETTERS - 1)
    loss = F.ctc_loss(
        chances,
        targets,
        torch.full((count,), len(chances)),
        torch.tensor(lengths),
        zero_infinity=True,
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 400)
    optimizer.step()
    recorder.step()
