"""A diffusion model's UNet trained at bf16 with an EMA of its weights and samples taken now and
then."""

import copy
import math

import recorder
import torch
import torch.nn.functional as F
from torch import nn

CH = 96


class Res(nn.Module):
    def __init__(self, a, b, emb=4 * CH):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, a), nn.Conv2d(a, b, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(32, b), nn.Conv2d(b, b, 3, padding=1)
        self.emb = nn.Linear(emb, b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x))) + self.emb(F.silu(e))[:, :, None, None]
        return self.c2(F.dropout(F.silu(self.n2(h)), 0.1, self.training)) + self.skip(x)


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, c),
            nn.Conv2d(c, 3 * c, 1),
            nn.Conv2d(c, c, 1),
        )

    def forward(self, x, _):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, 4, c // 4, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, mults=(1, 2, 2, 4)):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(CH, 4 * CH), nn.SiLU(), nn.Linear(4 * CH, 4 * CH))
        self.inp = nn.Conv2d(3, CH, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        widths, c = [CH], CH
        for level, m in enumerate(mults):
            for _ in range(2):
                self.downs.append(Res(c, CH * m))
                c = CH * m
                if level >= 2:
                    self.downs.append(Attn(c))
                widths.append(c)
            if level < len(mults) - 1:
                self.downs.append(nn.Conv2d(c, c, 3, 2, 1))
                widths.append(c)
        self.mid = nn.ModuleList([Res(c, c), Attn(c), Res(c, c)])
        for level, m in reversed(list(enumerate(mults))):
            for _ in range(3):
                self.ups.append(Res(c + widths.pop(), CH * m))
                c = CH * m
                if level >= 2:
                    self.ups.append(Attn(c))
            if level:
                self.ups.append(nn.ConvTranspose2d(c, c, 4, 2, 1))
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(CH // 2, device=x.device) / (CH // 2))
        args = t[:, None].float() * freqs[None]
        e = self.time(torch.cat([args.cos(), args.sin()], 1))
        h = self.inp(x)
        skips = [h]
        for i, layer in enumerate(self.downs):
            h = layer(h, e) if not isinstance(layer, nn.Conv2d) else layer(h)
            following = self.downs[i + 1] if i + 1 < len(self.downs) else None
            if not isinstance(following, Attn):
                skips.append(h)
        for layer in self.mid:
            h = layer(h, e)
        for layer in self.ups:
            if isinstance(layer, Res):
                h = layer(torch.cat([h, skips.pop()], 1), e)
            elif isinstance(layer, Attn):
                h = layer(h, e)
            else:
                h = layer(h)
        return self.out(h)


model = UNet().cuda()
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
betas = torch.linspace(1e-4, 0.02, 1000).cuda()
alphas = torch.cumprod(1 - betas, 0)

for step in recorder.steps(12):
    x0 = torch.zeros(16, 3, 32, 32).cuda()
    t = torch.randint(1000, (16,), device="cuda")
    noise = torch.randn_like(x0)
    a = alphas[t].view(-1, 1, 1, 1)
    noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.mse_loss(model(noisy, t).float(), noise)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1e-4)
    if step % 6 == 5:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            x = torch.randn(16, 3, 32, 32, device="cuda")
            for i in reversed(range(0, 1000, 100)):
                when = torch.full((16,), i, device="cuda")
                eps = ema(x, when)
                x = (x - betas[i] / (1 - alphas[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
                if i:
                    x = x + betas[i].sqrt() * torch.randn_like(x)
            grid = x.clamp(-1, 1).add(1).mul(127.5).byte().cpu()
    recorder.step()
