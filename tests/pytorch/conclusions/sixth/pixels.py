"""A whole dataset is moved to the GPU, and made larger there.

cause: one_tensor
also: too_large
device: 6GiB
ends: oom
never: smaller batch|attention
"""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

images = torch.zeros(60000, 3, 64, 64, dtype=torch.uint8)
labels = torch.zeros(60000, dtype=torch.long)
images = images.cuda().float()
images = (images / 255.0 - 0.5) / 0.25
ds = TensorDataset(images, labels.cuda())
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).cuda()
opt = torch.optim.SGD(net.parameters(), 0.1)
for x, y in DataLoader(ds, batch_size=128, shuffle=True):
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
