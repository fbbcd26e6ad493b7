"""Diffusion, inference: the shapes of Stable Diffusion 1.5 in half precision: a text encoder, a
U-Net with guidance, a decoder; requests of one to three pictures in several sizes."""

import recorder
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

text = CLIPTextConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
)
with torch.device("cuda"):
    torch.set_default_dtype(torch.half)
    encoder = CLIPTextModel(text).eval()
    unet = UNet2DConditionModel(cross_attention_dim=768, sample_size=64).eval()
    decoder = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=4,
    ).eval()
    torch.set_default_dtype(torch.float)
scheduler = DDIMScheduler()
for _ in recorder.steps(4):
    count = recorder.draw.randint(1, 3)
    height, width = (recorder.draw.choice((384, 512, 640)) // 8 for _ in range(2))
    scheduler.set_timesteps(3)
    with torch.inference_mode():
        words = recorder.blank(count, 77)
        nothing = recorder.blank(count, 77)
        meaning = torch.cat([encoder(nothing)[0], encoder(words)[0]])
        latents = torch.randn(count, 4, height, width, device="cuda", dtype=torch.half)
        for moment in scheduler.timesteps:
            both = torch.cat([latents] * 2)
            without, guided = unet(both, moment, meaning)[0].chunk(2)
            noise = without + 7.5 * (guided - without)
            latents = scheduler.step(noise, moment, latents)[0]
        pictures = decoder.decode(latents / 0.18215)[0]
        (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu()
    recorder.step()
