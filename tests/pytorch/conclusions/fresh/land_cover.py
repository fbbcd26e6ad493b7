"""After its training a land cover model keeps the probabilities of all test tiles on the GPU.

cause: collects
device: 8 GiB
ends: oom
never: no_grad|inference_mode|detach|smaller model|checkpoint
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class FCN(nn.Module):
    def __init__(self, bands=3, classes=40, width=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(bands, width, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 1, 2, dilation=2), nn.ReLU(),
        )
        self.classify = nn.Conv2d(4 * width, classes, 1)

    def forward(self, x):
        y = self.classify(self.encoder(x))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


def tiles(n, size=8):
    for _ in range(n):
        yield torch.zeros(size, 3, 512, 512), torch.zeros(size, 512, 512, dtype=torch.long)


def train(model, epochs=2):
    opt = torch.optim.AdamW(model.parameters())
    model.train()
    for epoch in range(epochs):
        for image, target in tiles(6):
            loss = F.cross_entropy(model(image.cuda()), target.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        print("trained epoch", epoch, loss.item(), flush=True)


@torch.no_grad()
def predict(model):
    model.eval()
    probabilities = []
    for i, (image, _) in enumerate(tiles(200)):
        logits = model(image.cuda())
        probabilities.append(logits.softmax(dim=1))  # the cause
        print("tile batch", i, flush=True)
    return torch.cat(probabilities)


net = FCN().cuda()
train(net)
maps = predict(net).argmax(1).cpu()
print(maps.shape)
