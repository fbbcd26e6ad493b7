"""Retrieval: passages are embedded into an index that stays on the card, then queries are searched
and reranked."""

import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(31)
DIM, VOCAB = 768, 30522


class Encoder(nn.Module):
    def __init__(self, layers, out):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(512, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 12, 3072, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, out)

    def forward(self, tokens, mask):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        x = self.body(x, src_key_padding_mask=~mask)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.out(pooled)


with torch.device("cuda"):
    encoder, reranker = Encoder(12, DIM).half().eval(), Encoder(6, 1).half().eval()


def batch(lengths):
    longest = max(lengths)
    tokens = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return tokens.cuda(), mask.cuda()


chunks = []
with torch.inference_mode():
    for step in recorder.steps(20):
        if step < 14:
            lengths = sorted(
                (min(512, int(rng.gammavariate(3, 45)) + 5) for _ in range(1024)), reverse=True
            )
            parts = []
            for i in range(0, 1024, 64):
                parts.append(F.normalize(encoder(*batch(lengths[i : i + 64])).float(), dim=1))
            chunks.append(torch.cat(parts))
            # A copy of the corpus from elsewhere comes ready made.
            chunks.append(torch.zeros(rng.randrange(8000, 16000), DIM).cuda())
        else:
            index = torch.cat(chunks)
            for _ in range(4):
                n = rng.choice((1, 8, 32))
                queries = F.normalize(
                    encoder(*batch([rng.randrange(4, 30) for _ in range(n)])).float(), dim=1
                )
                best, where = [], []
                for i, part in enumerate(index.split(32768)):
                    s, w = (queries @ part.T).topk(50)
                    best.append(s)
                    where.append(w + i * 32768)
                best, where = torch.cat(best, 1), torch.cat(where, 1)
                score, order = best.topk(50)
                where = where.gather(1, order).cpu()
                for _ in range(min(n, 4)):
                    rank = reranker(*batch([rng.randrange(60, 300) for _ in range(50)])).squeeze(1)
                    rank.argsort(descending=True).cpu()
            del index
        recorder.step()
