"""A video transformer whose saved activations wait in pinned host memory, copied by a stream of
its own."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(4)
DIM, HEADS = 1024, 16
copies = torch.cuda.Stream()


class Offload(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, least=1 << 20):
        def pack(t):
            if t.numel() * t.element_size() < least or isinstance(t, nn.Parameter) or not t.is_cuda:
                return t
            host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                host.copy_(t, non_blocking=True)
            t.record_stream(copies)
            done = torch.cuda.Event()
            done.record(copies)
            return host, done, t.device

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            host, done, device = kept
            done.synchronize()
            with torch.cuda.stream(copies):
                t = host.to(device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(copies)
            t.record_stream(torch.cuda.current_stream())
            return t

        super().__init__(pack, unpack)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


with torch.device("cuda"):
    tube = nn.Conv3d(3, DIM, (2, 16, 16), (2, 16, 16)).bfloat16()
    layers = nn.ModuleList(Layer() for _ in range(12)).bfloat16()
    head = nn.Linear(DIM, 400).bfloat16()
optimizer = torch.optim.AdamW(
    [*tube.parameters(), *layers.parameters(), *head.parameters()], lr=1e-4
)

for step in recorder.steps(6):
    frames = rng.choice((8, 16))
    clip = torch.zeros(2, 3, frames, 224, 224, dtype=torch.bfloat16).cuda()
    x = tube(clip).flatten(2).transpose(1, 2)
    for layer in layers:
        with Offload():
            x = layer(x)
    loss = F.cross_entropy(head(x.mean(1)).float(), torch.zeros(2, dtype=torch.long, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
