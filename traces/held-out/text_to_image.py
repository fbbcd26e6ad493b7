"""Text to image in fp16: text encoder, guided steps of a latent UNet and decoding, at sizes the
users ask for."""

import math
import random

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(7)
TEXT, CH = 768, 256


class Cross(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(c), nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.o1 = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c)
        self.q, self.kv, self.o2 = (
            nn.Linear(c, c, bias=False),
            nn.Linear(TEXT, 2 * c, bias=False),
            nn.Linear(c, c),
        )
        self.up, self.down = nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def attend(self, q, k, v):
        q, k, v = (z.unflatten(2, (-1, 64)).transpose(1, 2) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x, text):
        b, c, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        y = y + self.o1(self.attend(*self.qkv(self.n1(y)).chunk(3, -1)))
        y = y + self.o2(self.attend(self.q(self.n2(y)), *self.kv(text).chunk(2, -1)))
        a, g = self.up(self.n3(y)).chunk(2, -1)
        y = y + self.down(a * F.gelu(g))
        return x + y.transpose(1, 2).reshape(b, c, h, w)


class Res(nn.Module):
    def __init__(self, a, b, time=1024):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, a), nn.Conv2d(a, b, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(32, b), nn.Conv2d(b, b, 3, padding=1)
        self.t = nn.Linear(time, b) if time else None
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, t=None):
        h = self.c1(F.silu(self.n1(x)))
        if t is not None:
            h = h + self.t(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Conv2d(4, CH, 3, padding=1), nn.Conv2d(CH, 4, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(CH, 1024), nn.SiLU(), nn.Linear(1024, 1024))
        self.d = nn.ModuleList([Res(CH, CH), Res(CH, 2 * CH), Res(2 * CH, 4 * CH)])
        self.a = nn.ModuleList([Cross(CH), Cross(2 * CH), Cross(4 * CH)])
        self.mid = nn.ModuleList([Res(4 * CH, 4 * CH), Cross(4 * CH), Res(4 * CH, 4 * CH)])
        self.u = nn.ModuleList([Res(8 * CH, 2 * CH), Res(4 * CH, CH), Res(2 * CH, CH)])
        self.b = nn.ModuleList([Cross(2 * CH), Cross(CH), Cross(CH)])

    def forward(self, x, t, text):
        f = torch.exp(-math.log(10000) * torch.arange(CH // 2, device=x.device) / (CH // 2))
        e = self.time(torch.cat([(t * f).cos(), (t * f).sin()]).half()[None].expand(x.shape[0], -1))
        h, skips = self.inp(x), []
        for i in range(3):
            h = self.a[i](self.d[i](h, e), text)
            skips.append(h)
            if i < 2:
                h = F.avg_pool2d(h, 2)
        h = self.mid[2](self.mid[1](self.mid[0](h, e), text), e)
        for i in range(3):
            s = skips.pop()
            if h.shape[-2:] != s.shape[-2:]:
                h = F.interpolate(h, size=s.shape[-2:], mode="nearest")
            h = self.b[i](self.u[i](torch.cat([h, s], 1), e), text)
        return self.out(h)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(4, 512, 3, padding=1)
        self.blocks = nn.ModuleList()
        c = 512
        for n in (512, 512, 256, 128):
            self.blocks.append(
                nn.ModuleList([Res(c, n, 0), Res(n, n, 0), nn.Conv2d(n, n, 3, padding=1)])
            )
            c = n
        self.out = nn.Conv2d(128, 3, 3, padding=1)

    def forward(self, z):
        x = self.inp(z)
        for i, (a, b, conv) in enumerate(self.blocks):
            x = b(a(x))
            if i < 3:
                x = conv(F.interpolate(x, scale_factor=2, mode="nearest"))
        return self.out(x)


with torch.device("cuda"):
    embed = nn.Embedding(49408, TEXT).half()
    layer = nn.TransformerEncoderLayer(TEXT, 12, 3072, batch_first=True, norm_first=True)
    text_encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).half().eval()
    unet, decoder = UNet().half().eval(), Decoder().half().eval()

SIZES = [(512, 512), (512, 768), (768, 512), (768, 768), (640, 960)]
for request in recorder.steps(8):
    with torch.inference_mode():
        n, (h, w) = rng.choice((1, 1, 2, 4)), rng.choice(SIZES)
        text = text_encoder(embed(torch.zeros(2, 77, dtype=torch.long).cuda()))
        text = text.repeat_interleave(n, 0)
        latents = torch.randn(n, 4, h // 8, w // 8, device="cuda", dtype=torch.half)
        steps = rng.choice((8, 12, 20))
        for i in range(steps):
            t = torch.tensor(1000.0 * (1 - i / steps), device="cuda")
            noise = unet(torch.cat([latents] * 2), t, text)
            without, given = noise.chunk(2)
            noise = without + 7.5 * (given - without)
            latents = latents - noise / steps
        for z in latents.split(1):
            picture = (decoder(z / 0.18215) / 2 + 0.5).clamp(0, 1)
            picture = picture.permute(0, 2, 3, 1).float().cpu()
    recorder.step()
