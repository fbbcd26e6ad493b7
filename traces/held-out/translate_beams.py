"""Translation with an encoder and decoder: beam search whose caches are reordered after each
token."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(17)
VOCAB, DIM, HEADS, BEAM = 24000, 512, 8, 5


def heads(x):
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o1 = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q, self.kv, self.o2 = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2048), nn.ReLU(), nn.Linear(2048, DIM))

    def forward(self, x, past, memory, mask):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = heads(q), heads(k), heads(v)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o1(y.transpose(1, 2).flatten(2))
        y = F.scaled_dot_product_attention(heads(self.q(self.n2(x))), *memory, attn_mask=mask)
        x = x + self.o2(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n3(x)), (k, v)


embed = nn.Embedding(VOCAB, DIM).cuda()
encoder = (
    nn.TransformerEncoder(
        nn.TransformerEncoderLayer(DIM, HEADS, 2048, batch_first=True, norm_first=True),
        6,
        enable_nested_tensor=False,
    )
    .cuda()
    .eval()
)
decoder = nn.ModuleList(DecoderLayer() for _ in range(6)).cuda().eval()


@torch.no_grad()
def translate(lengths):
    n, longest = len(lengths), max(lengths)
    source = torch.zeros(n, longest, dtype=torch.long).cuda()
    padding = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
    padding = padding.cuda()
    memory = encoder(embed(source), src_key_padding_mask=padding)
    memory = memory.repeat_interleave(BEAM, 0)
    mask = ~padding.repeat_interleave(BEAM, 0)[:, None, None]
    across = [tuple(heads(z) for z in layer.kv(memory).chunk(2, -1)) for layer in decoder]
    past = [None] * len(decoder)
    tokens = torch.ones(n * BEAM, 1, dtype=torch.long, device="cuda")
    scores = torch.full((n, BEAM), -1e9, device="cuda")
    scores[:, 0] = 0
    base = torch.arange(n, device="cuda")[:, None] * BEAM
    for t in range(int(longest * rng.uniform(0.8, 1.3))):
        x = embed(tokens[:, -1:])
        for i, layer in enumerate(decoder):
            x, past[i] = layer(x, past[i], across[i], mask)
        logp = F.log_softmax(x[:, -1] @ embed.weight.T, -1).view(n, BEAM, VOCAB)
        total = (scores[:, :, None] + logp).view(n, -1)
        scores, best = total.topk(BEAM, -1)
        origin = (base + best // VOCAB).view(-1)
        tokens = torch.cat([tokens[origin], (best % VOCAB).view(-1, 1)], 1)
        past = [(k.index_select(0, origin), v.index_select(0, origin)) for k, v in past]
    return tokens.view(n, BEAM, -1)[:, 0].cpu()


sentences = [max(4, int(rng.gammavariate(2.5, 9))) for _ in range(1200)]
for step in recorder.steps(6):
    lot = sorted(sentences[step % 50 * 24 : (step % 50 + 1) * 24])
    for i in range(0, 24, 4):
        translate(lot[i : i + 4])
    recorder.step()
