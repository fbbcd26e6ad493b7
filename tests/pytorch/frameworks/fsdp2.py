"""FSDP2: a transformer sharded over eight ranks, of which this process is one (torch's own fake
process group stands for the rest)."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


def train(offload):
    torch.manual_seed(0)
    with torch.device("cpu" if offload else "cuda"):
        model = nn.Sequential(
            nn.Embedding(1000, 512),
            *(
                nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
                for _ in range(6)
            ),
            nn.Linear(512, 1000),
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=True) if offload else OffloadPolicy()
    for layer in model[1:-1]:
        fully_shard(layer, mp_policy=policy, offload_policy=where)
    fully_shard(model, mp_policy=policy, offload_policy=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = 0
    for length in (128, 256, 192, 320):
        tokens = torch.zeros(2, length, dtype=torch.long, device="cuda")
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    steps = train(offload=False) + train(offload=True)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
