"""Quantisation of a decoder layer by layer: the inputs of a layer are kept for all samples,
Hessians are summed by hooks, and the outputs become the inputs of the next one."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, SAMPLES = 1664, 4480, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.up, self.down = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH, bias=False),
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, 13, 128)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.silu(self.up(F.rms_norm(x, (WIDTH,)))))


kept = [torch.zeros(1, 1500, WIDTH, device="cuda", dtype=torch.half) for _ in range(SAMPLES)]
quantised = []
with torch.no_grad():
    for _ in recorder.steps(6):
        block = Block().half().cuda()
        hessians, hooks = {}, []
        for layer in (m for m in block.modules() if isinstance(m, nn.Linear)):
            hessians[layer] = torch.zeros(layer.in_features, layer.in_features, device="cuda")

            def add(layer, inputs, _):
                x = inputs[0].flatten(0, 1).float()
                hessians[layer] += x.t() @ x * (2 / SAMPLES)

            hooks.append(layer.register_forward_hook(add))
        for x in kept:
            block(x)
        for hook in hooks:
            hook.remove()
        for layer, hessian in hessians.items():
            w, codes = layer.weight.float(), []
            inverse = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(
                len(hessian), device="cuda"
            )
            for at in range(0, w.shape[1], 128):
                part = w[:, at : at + 128].clone()
                scale = part.abs().amax(1, keepdim=True) / 7
                code = (part / scale).round().clamp(-8, 7)
                error = part - code * scale
                w[:, at + 128 :] -= error @ inverse[at : at + 128, at + 128 :]
                codes.append((code.char(), scale.half()))
            quantised.append(
                (torch.cat([c for c, _ in codes], 1), torch.cat([s for _, s in codes], 1))
            )
        for index, x in enumerate(kept):
            kept[index] = block(x)
            if index % 4 == 3:
                recorder.step()
