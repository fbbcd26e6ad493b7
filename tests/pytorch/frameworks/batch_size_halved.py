"""The loop that people write: try a batch, halve it on out-of-memory, go on training with what
fits."""

import json

import torch
from torch import nn


def train(model, optimizer, batch, steps):
    for _ in range(steps):
        x = torch.zeros(batch, 256, 512, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main():
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(4)
    )
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch, tried, message = 512, [], None
    while True:
        try:
            tried.append(batch)
            train(model, optimizer, batch, 2)
            break
        except torch.OutOfMemoryError as error:
            message = str(error)
            batch //= 2
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    # Goes on as if nothing had been.
    train(model, optimizer, batch, 6)
    print(json.dumps({"batch": batch, "tried": tried, "message": message}))


if __name__ == "__main__":
    main()
