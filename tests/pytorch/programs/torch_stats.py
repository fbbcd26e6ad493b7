"""What torch's own functions say, step by step: the same program under torch's own allocator and
under ours, with torch's functions mended."""

import os

import torch
from torch import nn

import gpu

gpu.install()
if gpu.witnessed:
    from gruyere._torch import stats

    stats.install()
torch.manual_seed(0)
told = []


def tell(what):
    stats = torch.cuda.memory_stats()
    told.append((what, {key: value for key, value in stats.items() if isinstance(value, int)}))


layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 1000)
).cuda()
tell("model")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    tokens = torch.zeros(4, 64 + 16 * (step % 4), dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    tell(f"forward {step}")
    loss.backward()
    tell(f"backward {step}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del tokens, loss
    tell(f"step {step}")
    if step == 2:
        torch.cuda.reset_peak_memory_stats()
        tell("peaks reset")
    if step == 3:
        torch.cuda.reset_accumulated_memory_stats()
        tell("counts reset")
# Odd sizes, around every limit that there is.
kept = [
    torch.empty(size, dtype=torch.uint8, device="cuda")
    for size in (1, 511, 513, 1 << 20, (1 << 20) + 1, 9_999_999, 20 << 20)
]
tell("odd sizes")
torch.cuda.reset_peak_memory_stats()
del kept[::2]
tell("some freed")
gpu.check_books()
kept.clear()
facts = {}
if gpu.library is not None:
    numbers = gpu.stats()
    # Without a record there is nobody to ask.
    outside = (
        None
        if "record:off" in os.environ.get("GRUYERE_CONF", "")
        else gpu.from_outside()["devices"][0]
    )
    facts = {"live": numbers.live, "reserved": numbers.reserved, "outside": outside}
    facts["mallocs"] = gpu.phantom.phantom_witness_mallocs()
    tell("end")
summary = torch.cuda.memory_summary(), torch.cuda.memory_summary(abbreviated=True)
allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
gpu.report(told=told, summary=summary, allocated_peak=allocated, reserved_peak=reserved, **facts)
