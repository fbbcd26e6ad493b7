"""diffusers: its transformer denoiser, trained on noise and then run through a scheduler's steps
with growing images."""

import json

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from torch.nn import functional as F


def main():
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=4,
        num_layers=6,
        sample_size=32,
        num_embeds_ada_norm=1000,
    ).cuda()
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = torch.zeros(4, dtype=torch.long, device="cuda")
    steps = 0
    for _ in range(4):
        clean, noise = (torch.randn(4, 4, 32, 32, device="cuda") for _ in range(2))
        times = torch.randint(0, 1000, (4,)).to("cuda")
        noisy = scheduler.add_noise(clean, noise, times)
        loss = F.mse_loss(model(noisy, times, labels).sample[:, :4], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    scheduler.set_timesteps(5)
    image = torch.randn(4, 4, 32, 32, device="cuda")
    with torch.no_grad():
        for time in scheduler.timesteps:
            predicted = model(image, time.expand(4).to("cuda"), labels).sample[:, :4]
            image = scheduler.step(predicted, time, image).prev_sample
    print(json.dumps({"steps": steps, "image": list(image.shape)}))


if __name__ == "__main__":
    main()
