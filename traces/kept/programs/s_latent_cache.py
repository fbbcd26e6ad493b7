"""Latents of pictures for a diffusion model's training: copies ahead, an encoder on the main
stream, a text encoder on another; latents and texts of all pictures are kept."""

import recorder
import torch
from torch import nn

copies, texts, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()


def conv(a, b, s=2):
    return [nn.Conv2d(a, b, 3, s, 1), nn.GroupNorm(8, b), nn.SiLU()]


vae = (
    nn.Sequential(
        *conv(3, 64, 1), *conv(64, 128), *conv(128, 256), *conv(256, 256), nn.Conv2d(256, 16, 1)
    )
    .half()
    .cuda()
)
layer = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True)
text = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval().half().cuda()
embed = nn.Embedding(49_408, 1024).half().cuda()
texts.wait_stream(main)
cache = []
with torch.no_grad():
    for _ in recorder.steps(80):
        size = recorder.draw.choice([(512, 768), (640, 640), (448, 896)])
        host = torch.zeros(8, 3, *size, dtype=torch.half).pin_memory()
        with torch.cuda.stream(copies):
            x = host.cuda(non_blocking=True)
        with torch.cuda.stream(texts):
            words = text(embed(recorder.blank(8, 77, high=49_408)))
        main.wait_stream(copies)
        x.record_stream(main)
        mean, spread = vae(x).chunk(2, 1)
        cache.append((mean + spread.exp() * torch.randn_like(mean), words))
        recorder.step()
