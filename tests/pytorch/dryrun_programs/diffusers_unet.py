"""diffusers: the training loop of its tutorial on a small UNet, three steps, with EMA weights."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn.functional import mse_loss

model = UNet2DModel(
    sample_size=64, in_channels=3, out_channels=3, layers_per_block=2,
    block_out_channels=(64, 128, 256, 256),
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
).cuda()  # fmt: skip
noise = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 1, 3)
averaged = EMAModel(model.parameters())
averaged.to("cuda")
for _ in range(3):
    clean, added = (torch.randn(8, 3, 64, 64).cuda() for _ in range(2))
    steps = torch.randint(0, 1000, (8,)).cuda()
    predicted = model(noise.add_noise(clean, added, steps), steps, return_dict=False)[0]
    mse_loss(predicted, added).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    averaged.step(model.parameters())
