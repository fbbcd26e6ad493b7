"""A character model retains its graphs in backward() and keeps each loss for a plot at the end.

cause: graph
device: 3 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)
"""
import torch
import torch.nn as nn

TEXT = "the quick brown fox jumps over the lazy dog. " * 20000


class CharRNN(nn.Module):
    def __init__(self, n, hidden=512, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(n, hidden)
        self.rnn = nn.GRU(hidden, hidden, layers)
        self.decoder = nn.Linear(hidden, n)

    def forward(self, chars, hidden):
        out, hidden = self.rnn(self.encoder(chars), hidden)
        return self.decoder(out), hidden


def batchify(text, columns):
    data = torch.tensor(list(text.encode()))
    rows = len(data) // columns
    return data[: rows * columns].view(columns, rows).t().contiguous()


data = batchify(TEXT, 192).cuda()
model = CharRNN(128).cuda()
opt = torch.optim.Adam(model.parameters(), lr=0.002)
criterion = nn.CrossEntropyLoss()
bptt = 100

hidden = torch.zeros(2, 192, 512, device="cuda")
losses = []
for i in range(0, len(data) - bptt - 1, bptt):
    x, y = data[i : i + bptt], data[i + 1 : i + 1 + bptt]
    opt.zero_grad()
    output, hidden = model(x, hidden.detach())  # the cause
    loss = criterion(output.flatten(0, 1), y.flatten())
    # an older version said "Trying to backward through the graph a second time"
    loss.backward(retain_graph=True)  # the cause
    opt.step()
    losses.append(loss)  # the cause
    print("chunk", i // bptt, "loss", loss.item(), flush=True)
print("mean", torch.stack(losses).mean().item())
