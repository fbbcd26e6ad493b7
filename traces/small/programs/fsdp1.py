"""FSDP1, a rank of eight: a Llama of 8 layers under FullyShardedDataParallel, bfloat16, at most two
gathers ahead (its default), AdamW."""

import functools

import llama
import ranks
import recorder
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

ranks.begin(8)
model = FullyShardedDataParallel(
    llama.Llama(width=1536, heads=12, inner=4096),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={llama.Layer}
    ),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    device_id=0,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in recorder.steps(5):
    loss = llama.loss_of(model, recorder.blank(2, recorder.draw.randrange(512, 1024, 64)))
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
ranks.end()
