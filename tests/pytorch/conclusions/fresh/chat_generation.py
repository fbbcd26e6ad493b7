"""A chat model generates long answers for a large batch of prompts with a cache of keys and values.

cause: too_large
device: 16 GiB
ends: oom
never: no_grad|inference_mode|checkpoint|backward|optimizer
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, HEADS, LAYERS, VOCAB = 2048, 16, 16, 32000


def split(t):
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(DIM, 5504, bias=False), nn.Linear(DIM, 5504, bias=False)
        self.down = nn.Linear(5504, DIM, bias=False)

    def forward(self, x, past):
        h = self.ln1(x)
        q, k, v = split(self.wq(h)), split(self.wk(h)), split(self.wv(h))
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.wo(a.transpose(1, 2).flatten(2))
        h = self.ln2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), (k, v)


class Chat(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, past):
        x, present = self.emb(ids), []
        for layer, kv in zip(self.layers, past):
            x, kv = layer(x, kv)
            present.append(kv)
        return self.head(x[:, -1:]), present


@torch.inference_mode()
def generate(model, ids, new_tokens):
    past, text = [None] * LAYERS, [ids]
    for n in range(new_tokens):
        logits, past = model(text[-1], past)
        text.append(logits.argmax(-1))
        if n % 20 == 0:
            print("token", n, flush=True)
    return torch.cat(text, dim=1)


with torch.device("cuda"):
    chat = Chat().half().eval()
for users in (8, 96):
    prompts = torch.zeros(users, 300, dtype=torch.long, device="cuda")
    answers = generate(chat, prompts, 100 if users == 8 else 1000)
    print("answered", users, answers.shape, flush=True)
