"""A speech recognizer trains on utterances of all lengths until the longest one of the set comes.

cause: too_large
device: 6 GiB
ends: oom
never: no_grad|inference_mode|detach|leak
"""
import random

import torch
from torch import nn

random.seed(7)
LENGTHS = [random.randint(200, 900) for _ in range(17)] + [4800] + [500] * 10


class Recognizer(nn.Module):
    def __init__(self, mels=80, width=384, layers=6, tokens=1000):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(mels, width), nn.ReLU())
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.mix = nn.Linear(2 * width, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.tokens = nn.Linear(width, tokens)

    def forward(self, frames):
        hidden, _ = self.lstm(self.front(frames))
        return self.tokens(self.encoder(self.mix(hidden)))


def batches(size):
    for length in LENGTHS:
        yield torch.zeros(size, length, 80), torch.zeros(size, length, dtype=torch.long)


def main():
    net = Recognizer().to("cuda")
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    criterion = nn.CrossEntropyLoss()
    for i, (frames, targets) in enumerate(batches(8)):
        frames, targets = frames.to("cuda"), targets.to("cuda")
        opt.zero_grad()
        logits = net(frames)
        loss = criterion(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        print("batch", i, "frames", tuple(frames.shape), "loss", float(loss), flush=True)


if __name__ == "__main__":
    main()
