"""Language model, evaluation: the logits of all tokens are kept in bfloat16, as the harness does
that compares two checkpoints' distributions afterwards."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, WORDS = 640, 8, 32_003
torch.set_default_dtype(torch.bfloat16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(2, (3, 10, 64)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


with torch.device("cuda"):
    embed, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
logits, losses = [], []
with torch.no_grad():
    for _ in recorder.steps(60):
        tokens = recorder.blank(
            recorder.draw.randrange(1, 5), recorder.draw.randrange(120, 700), high=WORDS
        )
        y = head(blocks(embed(tokens)))
        loss = F.cross_entropy(y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        losses.append(loss)
        logits.append(y)
        recorder.step()
torch.stack(losses).mean().item()
