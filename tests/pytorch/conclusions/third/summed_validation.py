"""Fine-tunes a classifier on sequences; sums the loss of an epoch for the progress line (with its
graph).

cause: no_grad
also: graph
device: 512 MiB
ends: oom
never: give this step less|checkpoint
"""

import os, time
import torch
import torch.nn as nn


class Tagger(nn.Module):
    def __init__(self, vocab=20000, dim=256, hidden=512, classes=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.Sequential(nn.Conv1d(dim, hidden, 5, padding=2), nn.ReLU(),
                                     nn.Conv1d(hidden, 2 * hidden, 5, padding=2), nn.ReLU())
        first, last = nn.Linear(2 * hidden, hidden), nn.Linear(hidden, classes)
        self.head = nn.Sequential(first, nn.ReLU(), last)

    def forward(self, tokens):
        states = self.encoder(self.embed(tokens).transpose(1, 2))
        return self.head(states.mean(2))


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum = self.sum + value * n
        self.count += n

    @property
    def average(self):
        return float(self.sum) / max(1, self.count)


def validate(model, criterion, batches=40):
    model.eval()
    meter, outputs = Meter(), []
    for _ in range(batches):
        tokens = torch.randint(0, 20000, (32, 64), device="cuda")
        labels = torch.randint(0, 12, (32,), device="cuda")
        scores = model(tokens)  # the cause
        meter.update(criterion(scores, labels), len(labels))  # the cause
        outputs.append(scores.argmax(-1))
        time.sleep(float(os.environ.get("SLOW", "0")))
    model.train()
    return meter.average, torch.cat(outputs)


def train(epochs=5, steps=20):
    model = Tagger().cuda()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        meter = Meter()
        for _ in range(steps):
            tokens = torch.randint(0, 20000, (32, 64), device="cuda")
            labels = torch.randint(0, 12, (32,), device="cuda")
            loss = criterion(model(tokens), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            meter.update(loss.detach(), len(labels))
        average, _ = validate(model, criterion)
        print(f"epoch {epoch}: train {meter.average:.3f} valid {average:.3f}", flush=True)


if __name__ == "__main__":
    train()
