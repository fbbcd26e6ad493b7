"""GAN, training: CycleGAN on pictures of 256 x 256, two generators, two judges, and a pool of fifty
earlier pictures for each judge."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def convolution(inside, outside, kernel, stride=1, padding=0):
    return [
        nn.Conv2d(inside, outside, kernel, stride, padding),
        nn.InstanceNorm2d(outside),
        nn.ReLU(True),
    ]


def generator(width=64):
    layers = [nn.ReflectionPad2d(3), *convolution(3, width, 7)]
    layers += convolution(width, 2 * width, 3, 2, 1) + convolution(2 * width, 4 * width, 3, 2, 1)
    for _ in range(9):
        inner = [nn.ReflectionPad2d(1), *convolution(4 * width, 4 * width, 3)]
        inner += [nn.ReflectionPad2d(1), *convolution(4 * width, 4 * width, 3)[:2]]
        layers.append(Residual(*inner))
    for inside in (4 * width, 2 * width):
        layers += [
            nn.ConvTranspose2d(inside, inside // 2, 3, 2, 1, 1),
            nn.InstanceNorm2d(inside // 2),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh()).cuda()


def judge(width=64):
    layers, inside = [], 3
    for outside, stride in ((width, 2), (2 * width, 2), (4 * width, 2), (8 * width, 1)):
        layers += [nn.Conv2d(inside, outside, 4, stride, 1), nn.LeakyReLU(0.2)]
        inside = outside
    return nn.Sequential(*layers, nn.Conv2d(inside, 1, 4, 1, 1)).cuda()


class Pool:
    """Earlier pictures, of which half of the time one is shown in place of the new one."""

    def __init__(self):
        self.kept = []

    def ask(self, picture):
        if len(self.kept) < 50:
            self.kept.append(picture.clone())
            return picture
        if recorder.draw.random() < 0.5:
            place = recorder.draw.randrange(50)
            old, self.kept[place] = self.kept[place], picture.clone()
            return old
        return picture


def truth(scores, wanted):
    return F.mse_loss(scores, torch.full_like(scores, wanted))


forth, back, judge_a, judge_b = generator(), generator(), judge(), judge()
makers = torch.optim.Adam([*forth.parameters(), *back.parameters()], lr=2e-4, betas=(0.5, 0.999))
judges = torch.optim.Adam([*judge_a.parameters(), *judge_b.parameters()], lr=2e-4)
pool_a, pool_b = Pool(), Pool()
for _ in recorder.steps(6):
    real_a, real_b = (recorder.blank(1, 3, 256, 256, dtype=torch.float) for _ in range(2))
    for model in (judge_a, judge_b):
        model.requires_grad_(False)
    makers.zero_grad()
    fake_b, fake_a = forth(real_a), back(real_b)
    loss = truth(judge_b(fake_b), 1.0) + truth(judge_a(fake_a), 1.0)
    loss = loss + 10 * (F.l1_loss(back(fake_b), real_a) + F.l1_loss(forth(fake_a), real_b))
    loss = loss + 5 * (F.l1_loss(back(real_a), real_a) + F.l1_loss(forth(real_b), real_b))
    loss.backward()
    makers.step()
    for model in (judge_a, judge_b):
        model.requires_grad_(True)
    judges.zero_grad()
    for model, pool, real, fake in (
        (judge_a, pool_a, real_a, fake_a),
        (judge_b, pool_b, real_b, fake_b),
    ):
        shown = pool.ask(fake.detach())
        (truth(model(real), 1.0) + truth(model(shown), 0.0)).mul(0.5).backward()
    judges.step()
    recorder.step()
