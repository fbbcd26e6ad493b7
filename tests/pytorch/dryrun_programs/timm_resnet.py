"""timm: a ResNet and its own optimizer, loss and schedule, cuDNN choosing by trial, channels last,
fp16 with a scaler; three steps."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

torch.backends.cudnn.benchmark = True
model = timm.create_model("resnet50", pretrained=False, drop_path_rate=0.05).cuda()
model = model.to(memory_format=torch.channels_last)
averaged = ModelEmaV3(model)
optimizer = create_optimizer_v2(model, opt="lamb", lr=5e-3)
criterion, scaler = LabelSmoothingCrossEntropy(), NativeScaler()
for _ in range(3):
    images = torch.randn(16, 3, 224, 224).cuda().to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (16,)).cuda()
    with torch.autocast("cuda", torch.half):
        loss = criterion(model(images), labels)
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    averaged.update(model)
