"""Trains a small translation model; batches are padded to their longest sentence.

cause: too_large
device: 3 GiB
ends: oom
never: no_grad|handle\.remove
"""

import os, random, time
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, PAD = 12000, 0


class Seq2Seq(nn.Module):
    def __init__(self, dim=384, layers=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.transformer = nn.Transformer(dim, 6, layers, layers, 4 * dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, source, target):
        length, device = target.shape[1], target.device
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=causal,
                                  src_key_padding_mask=source == PAD)
        return self.out(hidden)


class Corpus(torch.utils.data.Dataset):
    """Sentences of about 40 words, now and then a paragraph."""

    def __init__(self, size, seed=3):
        rng = random.Random(seed)
        self.lengths = [rng.randint(10, 70) if rng.random() < 0.9985 else rng.randint(400, 700)
                        for _ in range(size)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        n = self.lengths[index]
        return torch.randint(1, VOCAB, (n,)), torch.randint(1, VOCAB, (n + 1,))


def collate(pairs):
    pad = nn.utils.rnn.pad_sequence
    return (pad([s for s, _ in pairs], batch_first=True, padding_value=PAD),
            pad([t for _, t in pairs], batch_first=True, padding_value=PAD))


def main():
    torch.manual_seed(0)
    model = Seq2Seq().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, betas=(0.9, 0.98))
    loader = torch.utils.data.DataLoader(Corpus(20000), batch_size=48, collate_fn=collate)
    for step, (source, target) in enumerate(loader):
        source, target = source.cuda(), target.cuda()
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: length {source.shape[1]}, loss {loss.item():.3f}", flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))


if __name__ == "__main__":
    main()
