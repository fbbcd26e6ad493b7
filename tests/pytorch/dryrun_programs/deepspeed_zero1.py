"""DeepSpeed: ZeRO 1 on one rank, bf16, three steps of a transformer."""

import os

import deepspeed
import torch
from torch import nn

one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.update(one | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"})
layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)]
model = nn.Sequential(nn.Embedding(8000, 512), *layers, nn.Linear(512, 8000))
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        # DeepSpeed's own is compiled with nvcc when it is first used.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    },
)
for _ in range(3):
    tokens = torch.randint(0, 8000, (4, 256)).to(engine.device)
    loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten())
    engine.backward(loss)
    engine.step()
engine.destroy()
