"""DistributedDataParallel, a rank of eight: a decoder with the parts of Llama in autocast,
gradients reduced in buckets of 25 MiB on NCCL's stream while the backward pass goes on."""

import llama
import ranks
import recorder
import torch
from torch.nn.parallel import DistributedDataParallel

ranks.begin(8)
with torch.device("cuda"):
    model = llama.Llama(width=768, heads=12, inner=2048)
# The other ranks, which are not there, have the same parameters.
parallel = DistributedDataParallel(model, device_ids=[0], init_sync=False)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
for _ in recorder.steps(6):
    with torch.autocast("cuda", torch.bfloat16):
        loss = llama.loss_of(parallel, recorder.blank(4, recorder.draw.randrange(256, 768, 64)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
ranks.end()
