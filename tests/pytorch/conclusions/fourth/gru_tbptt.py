"""Character GRU: truncated backprop, then perplexity of a long text; the state is carried on.

cause: no_grad
also: graph
device: 1 GiB
ends: oom
never: smaller batch|checkpoint
"""
import torch
from torch import nn
import torch.nn.functional as F


class CharGRU(nn.Module):
    def __init__(self, vocab=256, dim=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList([nn.GRUCell(dim, dim) for _ in range(2)])
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens, state):
        logits = []
        for t in range(tokens.shape[1]):
            x = self.embed(tokens[:, t])
            new = []
            for cell, h in zip(self.cells, state):
                x = cell(x, h)
                new.append(x)
            state = new
            logits.append(self.out(x))
        return torch.stack(logits, 1), state


def chunks_of_text(n, batch, length=16):
    for _ in range(n):
        yield torch.zeros(batch, length, dtype=torch.long)


def train(model, opt, state):
    for tokens in chunks_of_text(30, 64):
        tokens = tokens.cuda()
        state = [h.detach() for h in state]
        logits, state = model(tokens, state)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()


def perplexity(model, state):
    model.eval()
    total = 0.0
    for tokens in chunks_of_text(2000, 32):
        tokens = tokens.cuda()
        logits, state = model(tokens, state)  # the cause
        total += F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item()
    return total


def fresh(batch):
    return [torch.zeros(batch, 512, device="cuda") for _ in range(2)]


if __name__ == "__main__":
    model = CharGRU().cuda()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(3):
        train(model, opt, fresh(64))
        print(perplexity(model, fresh(32)))
