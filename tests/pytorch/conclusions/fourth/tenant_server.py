"""A server: one base transformer, one adapter stack per tenant, loaded on first use.

cause: grows
also: cache
device: 512 MiB
ends: oom
never: fewer bits|smaller batch|shard
"""
import random
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self, dim=512, layers=4):
        super().__init__()
        self.embed = nn.Embedding(8000, dim)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True) for _ in range(layers)])

    def forward(self, tokens, adapters):
        x = self.embed(tokens)
        for layer, adapter in zip(self.layers, adapters):
            x = layer(x)
            x = x + adapter(x)
        return x


def load_adapter(tenant, dim=512, layers=4):
    """As if from disk: a bottleneck per layer."""
    return nn.ModuleList([
        nn.Sequential(nn.Linear(dim, 768), nn.GELU(), nn.Linear(768, dim)) for _ in range(layers)])


class Server:
    def __init__(self):
        self.base = Base().cuda().eval()
        self.adapters = {}

    def adapter_of(self, tenant):
        if tenant not in self.adapters:
            self.adapters[tenant] = load_adapter(tenant).to("cuda").eval()  # the cause
        return self.adapters[tenant]

    @torch.inference_mode()
    def handle(self, request):
        tenant, prompt = request
        tokens = torch.zeros(4, prompt, dtype=torch.long).to("cuda")
        hidden = self.base(tokens, self.adapter_of(tenant))
        return hidden[:, -1].cpu()


rng = random.Random(0)
server = Server()
for number in range(2000):
    server.handle((f"tenant-{rng.randrange(500)}", rng.randrange(32, 256)))
