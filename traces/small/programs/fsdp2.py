"""FSDP2 on one device: a Llama of 8 layers, fully_shard, bfloat16 with gradients reduced in
float32, on a stream of their own, AdamW."""

import llama
import ranks
import recorder
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 1


def train(ranks_of_the_job, model, batch, steps):
    ranks.begin(ranks_of_the_job)
    with torch.device("cuda"):
        model = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in recorder.steps(steps):
        length = recorder.draw.randrange(768, 1280, 64)
        loss = llama.loss_of(model, recorder.blank(batch, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()
    ranks.end()


if __name__ == "__main__":
    train(RANKS, llama.Llama, batch=2, steps=5)
