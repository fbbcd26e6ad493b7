"""A plain training script: DataLoader workers, pinned memory, copies that do not block, a
prefetching side stream."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64 + 8 * (index % 5), 128, generator=generator), index % 10


def collate(items):
    longest = max(len(item) for item, _ in items)
    batch = torch.zeros(len(items), longest, 128)
    for row, (item, _) in enumerate(items):
        batch[row, : len(item)] = item
    return batch, torch.tensor([label for _, label in items])


def prefetched(loader):
    """Copies the next batch on a stream of its own while this one is worked on."""
    side = torch.cuda.Stream()
    ahead = None
    for batch, labels in loader:
        with torch.cuda.stream(side):
            coming = batch.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(side)
        for tensor in coming:
            tensor.record_stream(torch.cuda.current_stream())
        ahead = coming
    yield ahead


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Numbers(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
        collate_fn=collate,
    )
    steps = 0
    for _ in range(3):
        for batch, labels in prefetched(loader):
            loss = nn.functional.cross_entropy(model(batch).mean(1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    torch.cuda.synchronize()
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
