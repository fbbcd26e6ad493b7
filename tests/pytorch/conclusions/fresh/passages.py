"""A retrieval index keeps a few of very many small tensors and then needs one large piece.

cause: pieces
device: 2 GiB
ends: oom
never: no_grad|inference_mode|smaller (batch|model)|detach|checkpoint
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

DIM = 512


class PassageEncoder(nn.Module):
    def __init__(self, vocabulary=20000):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, DIM)
        self.project = nn.Linear(DIM, DIM)

    def forward(self, ids):
        return F.normalize(self.project(self.bag(ids)), dim=-1)


class Index:
    """Sentence vectors by document; documents come whole, and duplicates leave again."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.documents = {}

    def add(self, name, sentences):
        ids = torch.zeros(sentences, 16, dtype=torch.long, device="cuda")
        self.documents[name] = self.encoder(ids)  # the cause

    def drop_duplicates(self, keep):
        self.documents = {n: v for n, v in self.documents.items() if n in keep}  # the cause

    def similarity(self):
        everything = torch.cat(list(self.documents.values()))
        return (everything @ everything.T).fill_diagonal_(0)


@torch.inference_mode()
def main():
    index = Index(PassageEncoder().cuda().eval())
    for name in range(31000):  # a crawl: about 40 versions of each page follow one another
        index.add(name, 24)
        if name % 5000 == 0:
            print("indexed", name, flush=True)
    index.drop_duplicates(set(range(0, 31000, 40)))
    print("unique documents:", len(index.documents), flush=True)
    print("closest pair:", index.similarity().max().item())


main()
