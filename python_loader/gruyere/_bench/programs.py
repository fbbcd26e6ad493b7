"""The built-in programs: generators that yield after each step. They are seeded, so every allocator
gets the same requests.

What would depend on values computed by kernels (the number of tokens per expert) is drawn on the
host, so that the programs request the same memory on the stand-in, which runs no kernels. They need
nothing but torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.nn import functional as F

SEED = 7
Cache = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):  # type: ignore[misc]
    """A decoder layer as in LLaMA: attention without biases, and a gated MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def attend(self, x: torch.Tensor, past: Optional[Cache] = None) -> tuple[torch.Tensor, Cache]:
        batch, length, width = x.shape
        parts = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = parts.unbind(0)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return x + self.out(attended.transpose(1, 2).reshape(batch, length, width)), (k, v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attend(x)
        return self.mlp(x)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm2(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, *more: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, *more)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def blank(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="cuda")


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def llama(steps: int) -> Iterator[None]:
    width = 4096
    with torch.device("cuda"):
        model = Decoder([Block(width, 32, 11008) for _ in range(8)], width, 32000).to(
            torch.bfloat16
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(steps):
        for _ in range(2):
            tokens = blank(1, 2048)
            loss = loss_of(model(tokens), tokens) / 2
            loss.backward()
            del tokens, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def lengths(steps: int) -> Iterator[None]:
    draw, width = random.Random(SEED), 1024
    with torch.device("cuda"):
        model = Decoder([Block(width, 16, 2816) for _ in range(24)], width, 32000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        tokens = blank(draw.randint(1, 6), draw.randrange(100, 1600))
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens), tokens)
        loss.backward()
        del tokens, loss
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


class Experts(Block):
    """A layer with several MLPs, two of which are chosen for each token."""

    CHOICES = 2

    def __init__(self, width: int, heads: int, inner: int, experts: int) -> None:
        super().__init__(width, heads, 1)
        del self.gate, self.up, self.down
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, inner, bias=False), nn.GELU(), nn.Linear(inner, width, bias=False)
            )
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, order: Any = None, counts: Any = None) -> torch.Tensor:
        x, _ = self.attend(x)
        flat = self.norm2(x).flatten(0, 1)
        weights = torch.softmax(self.router(flat), -1).amax(-1, keepdim=True)
        pieces = flat.index_select(0, order).split(counts)
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces)])
        mixed = torch.zeros_like(flat).index_add(0, order, done * weights.index_select(0, order))
        return x + mixed.view_as(x)


def moe(steps: int) -> Iterator[None]:
    draw, width, experts = random.Random(SEED), 1024, 8
    with torch.device("cuda"):
        model = Decoder([Experts(width, 16, 4096, experts) for _ in range(8)], width, 32000).to(
            torch.bfloat16
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    copies = torch.cuda.Stream()
    host = torch.Generator().manual_seed(SEED)

    def load() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        batch, length = 4, draw.randrange(512, 1024)
        chosen = Experts.CHOICES * batch * length
        shares = [draw.random() ** 2 + 0.05 for _ in range(experts)]
        counts = [int(chosen * share / sum(shares)) for share in shares]
        counts[0] += chosen - sum(counts)
        order = (torch.randperm(chosen, generator=host) // Experts.CHOICES).pin_memory()
        with torch.cuda.stream(copies):
            return (
                torch.zeros(batch, length, dtype=torch.long, device="cuda"),
                order.cuda(non_blocking=True),
                counts,
            )

    coming = load()
    for _ in range(steps):
        tokens, order, counts = coming
        torch.cuda.current_stream().wait_stream(copies)
        for tensor in (tokens, order):
            tensor.record_stream(torch.cuda.current_stream())
        coming = load()
        loss = loss_of(model(tokens, order, counts), tokens)
        loss.backward()
        del tokens, order, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


class Offload:
    """Offloads saved tensors of at least 1 MiB to pinned host memory and copies them back for the
    backward pass, on a separate stream."""

    LEAST = 1 << 20

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def pack(self, tensor: torch.Tensor) -> Any:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter) or tensor.nbytes < self.LEAST or not tensor.is_cuda:
            return tensor
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        if packed.is_cuda:
            return packed
        with torch.cuda.stream(self.stream):
            tensor = packed.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


def offload(steps: int) -> Iterator[None]:
    draw, width = random.Random(SEED), 2048
    with torch.device("cuda"):
        model = Decoder([Block(width, 16, 5632) for _ in range(8)], width, 32000).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    keeper = Offload()
    for _ in range(steps):
        tokens = blank(1, draw.choice((768, 896, 1024)))
        with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
            loss = loss_of(model(tokens), tokens)
        loss.backward()
        del tokens, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def generate(steps: int) -> Iterator[None]:
    """Serve up to 16 sequences at a time; each starts with a prompt and grows by a chunk per step
    until it is done."""
    with torch.device("cuda"):
        model = Decoder([Block(1024, 16, 2816) for _ in range(16)], 1024, 32000).to(torch.bfloat16)
    serving = Serving(model)
    for _ in range(steps):
        serving.step()
        yield


class Serving:
    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.draw = random.Random(SEED)
        # Each sequence's final length, and its caches.
        self.sequences: list[tuple[int, list[Optional[Cache]]]] = []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        while len(self.sequences) < 16:
            length = self.draw.randrange(64, 1024)
            self.sequences.append(
                (length + 32 * self.draw.randrange(2, 12), [None] * len(self.model.layers))
            )
            self.advance(len(self.sequences) - 1, length)
        for index in range(len(self.sequences)):
            self.advance(index, 32)
        self.sequences = [
            (wanted, caches)
            for wanted, caches in self.sequences
            if caches[0] and caches[0][0].shape[2] < wanted
        ]

    def advance(self, index: int, count: int) -> None:
        wanted, caches = self.sequences[index]
        x = self.model.embedding(blank(1, count))
        grown: list[Optional[Cache]] = []
        for layer, cache in zip(self.model.layers, caches):
            x, cache = layer.attend(x, cache)
            x = layer.mlp(x)
            grown.append(cache)
        self.model.head(self.model.norm(x[:, -1]))
        self.sequences[index] = (wanted, grown)


def small(steps: int) -> Iterator[None]:
    draw = random.Random(SEED)
    with torch.device("cuda"):
        layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        model = nn.Sequential(nn.Embedding(16000, 384), encoder, nn.Linear(384, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for _ in range(steps):
        tokens = blank(16, draw.randrange(16, 256))
        loss = F.cross_entropy(model(tokens).mean(1), tokens[:, 0] % 2)
        loss.backward()
        del tokens, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


class Bottleneck(nn.Module):  # type: ignore[misc]
    """ResNet-50's block."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, size, step in (
            (inside, width, 1, 1),
            (width, width, 3, stride),
            (width, 4 * width, 1, 1),
        ):
            layers += [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b)]
            layers.append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def vision(steps: int) -> Iterator[None]:
    draw = random.Random(SEED)
    layers, inside = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    with torch.device("cuda"):
        for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(repeats):
                layers.append(Bottleneck(inside, width, stride if index == 0 else 1))
                inside = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)]
        model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        pictures = torch.zeros(16, 3, 160, 160, device="cuda")
        loss = F.cross_entropy(model(pictures), blank(16, 1)[:, 0])
        loss.backward()
        del pictures, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            model(torch.zeros(draw.randrange(1, 48), 3, 192, 192, device="cuda")).argmax(-1)
        yield


def graph(steps: int) -> Iterator[None]:
    draw, nodes, width = random.Random(SEED), 300_000, 128
    with torch.device("cuda"):
        features = torch.zeros(nodes, width)
        layers = nn.ModuleList(
            nn.Linear(2 * inside, outside)
            for inside, outside in ((width, 256), (256, 256), (256, 47))
        )
    optimizer = torch.optim.Adam(layers.parameters(), lr=3e-3)
    for _ in range(steps):
        # Neighbours shared by several nodes count once, so layers have arbitrary sizes.
        counts = [1024]
        for most in (15, 10, 5):
            counts.append(int(counts[-1] * (1 + most * draw.uniform(0.3, 0.7))))
        x = features[blank(counts[-1], 1)[:, 0]]
        for layer, count in zip(layers, counts[-2::-1]):
            edges = blank(2, int(len(x) * draw.uniform(1.0, 1.3)))
            near = x.new_zeros(count, x.shape[1]).index_add(0, edges[1], x[edges[0]])
            x = F.relu(layer(torch.cat((x[:count], near), 1)))
        loss = F.cross_entropy(x, blank(counts[0], 1)[:, 0])
        loss.backward()
        del x, edges, near, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def adapters(steps: int) -> Iterator[None]:
    """Serve one model with the small weights of many tasks, of which a hundred are loaded at a
    time."""
    draw, width, depth = random.Random(SEED), 1024, 12
    with torch.device("cuda"):
        model = Decoder([Block(width, 16, 2816) for _ in range(depth)], width, 32000).half()
    loaded: dict[int, list[torch.Tensor]] = {}
    for _ in range(steps):
        for _ in range(30):
            task = int(200 * draw.random() ** 1.5)
            if task not in loaded:
                if len(loaded) == 100:
                    del loaded[next(iter(loaded))]
                rank = random.Random(task).choice((4, 8, 16, 32, 64))
                loaded[task] = [
                    torch.zeros(shape, dtype=torch.half, device="cuda")
                    for _ in range(2 * depth)
                    for shape in ((rank, width), (width, rank))
                ]
        x = model.embedding(blank(draw.randrange(1, 8), draw.randrange(16, 300)))
        pairs = iter(loaded[task])
        with torch.no_grad():
            for layer in model.layers:
                down, up = next(pairs), next(pairs)
                x = layer(x) + F.linear(F.linear(x, down), up)
            model.head(model.norm(x[:, -1]))
        del x
        yield


PROGRAMS: dict[str, Callable[[int], Iterator[None]]] = {
    program.__name__: program
    for program in (llama, lengths, moe, offload, generate, small, vision, graph, adapters)
}
