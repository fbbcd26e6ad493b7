"""Streams a model's layers from the host on a copy stream, ahead of the computation (offloading).

cause: too_large
device: 256 MiB
ends: oom
never: or offloading|checkpoint|smaller batch
"""

import os, time
import torch
import torch.nn as nn


class OffloadedModel:
    def __init__(self, dim=2048, layers=24, ahead=16):
        self.weights = [torch.empty(dim, dim).pin_memory() for _ in range(layers)]
        self.copy_stream = torch.cuda.Stream()
        self.ahead = ahead

    def fetch(self, i):
        with torch.cuda.stream(self.copy_stream):
            weight = self.weights[i].to("cuda", non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.copy_stream)
        return weight, event

    def forward(self, x):
        stream = torch.cuda.current_stream()
        queue = [self.fetch(i) for i in range(min(self.ahead, len(self.weights)))]
        for i in range(len(self.weights)):
            weight, event = queue.pop(0)
            stream.wait_event(event)
            x = torch.relu(x @ weight)
            weight.record_stream(stream)
            del weight
            if i + self.ahead < len(self.weights):
                queue.append(self.fetch(i + self.ahead))
        return x


class Head(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        return self.fc(self.norm(x))


def main():
    body, head = OffloadedModel(), Head(2048, 1000).cuda()
    optimizer = torch.optim.AdamW(head.parameters())
    for step in range(200):
        x = torch.randn(1024, 2048, device="cuda")
        y = torch.randint(0, 1000, (1024,), device="cuda")
        with torch.no_grad():
            features = body.forward(x)
        loss = nn.functional.cross_entropy(head(features), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item(), flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
