"""Embeds a data set of images for a search index. (Forgot torch.no_grad().)

cause: no_grad
device: 3 GiB
ends: oom
never: checkpoint
"""

import os, time
import torch
import torch.nn as nn


class PatchEncoder(nn.Module):
    """A small vision transformer."""

    def __init__(self, dim=384, depth=6, heads=6, patch=16, size=224):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True,
                                       norm_first=True)
            for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Images(torch.utils.data.Dataset):
    def __init__(self, count=6400):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randint(0, 255, (3, 224, 224), dtype=torch.uint8), index


def build_index(model, loader):
    mean = torch.tensor([123.7, 116.3, 103.5], device="cuda").view(1, 3, 1, 1)
    std = torch.tensor([58.4, 57.1, 57.4], device="cuda").view(1, 3, 1, 1)
    vectors, ids = [], []
    for number, (images, index) in enumerate(loader):
        images = (images.cuda().float() - mean) / std
        features = model(images)  # the cause
        features = nn.functional.normalize(features, dim=-1)
        vectors.append(features)
        ids.append(index)
        if number % 5 == 0:
            print("batch", number, flush=True)
        time.sleep(float(os.environ.get("SLOW", "0")))
    return torch.cat(vectors), torch.cat(ids)


def main():
    model = PatchEncoder().cuda().eval()
    loader = torch.utils.data.DataLoader(Images(), batch_size=32, num_workers=0)
    vectors, ids = build_index(model, loader)
    torch.save({"vectors": vectors.cpu(), "ids": ids}, "index.pt")


if __name__ == "__main__":
    main()
