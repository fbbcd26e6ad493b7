"""A language model smooths its labels by hand through a one-hot of its whole vocabulary.

cause: one_tensor
device: 16 GiB
ends: oom
never: no_grad|inference_mode|detach|leak
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 64000


def smoothed(targets, epsilon=0.1):
    hard = F.one_hot(targets, VOCABULARY)  # the cause
    return hard * (1 - epsilon) + epsilon / VOCABULARY  # the cause


class GRULanguageModel(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCABULARY, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids):
        hidden, _ = self.rnn(self.embedding(ids))
        return self.out(hidden)


model = GRULanguageModel().cuda()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
# the text grows from lines to whole pages
for step, length in enumerate([32] * 6 + [64] * 6 + [512] * 6):
    ids = torch.zeros(48, length + 1, dtype=torch.long).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids[:, :-1])
    target = smoothed(ids[:, 1:])
    loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "length", length, "loss", loss.item(), flush=True)
