"""An embedding server remembers the exceptions of bad requests, whose tracebacks hold the tensors.

cause: grows
device: 2 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)|backward
"""
import itertools

import torch
import torch.nn as nn


class BadRequest(Exception):
    pass


class Embedder(nn.Module):
    def __init__(self, vocabulary=50000, dim=1024):
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 16, 2048, batch_first=True) for _ in range(4)
        )

    def forward(self, ids, wanted):
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = layer(hidden)  # the cause
        return self.pool(hidden, wanted)

    def pool(self, hidden, wanted):
        if wanted == "mean":
            return hidden.mean(1)
        if wanted == "cls":
            return hidden[:, 0]
        raise BadRequest(f"no such pooling: {wanted}")


class Server:
    def __init__(self):
        self.model = Embedder().cuda().eval()
        self.failures = {}

    @torch.inference_mode()
    def handle(self, number, texts, tokens, pooling):
        ids = torch.zeros(texts, tokens, dtype=torch.long, device="cuda")
        return self.model(ids, pooling).cpu()

    def serve(self, requests):
        for number, (texts, tokens, pooling) in enumerate(requests):
            try:
                self.handle(number, texts, tokens, pooling)
            except BadRequest as problem:
                self.failures[number] = problem  # the cause
            if number % 10 == 0:
                print(f"{number} served, {len(self.failures)} failed", flush=True)


requests = itertools.cycle(
    [(64, 256, "mean"), (32, 500, "cls"), (64, 300, "max"), (16, 512, "mean"), (48, 400, "cls")]
)
Server().serve(itertools.islice(requests, 1000))
