"""A training under LD_PRELOAD: torch knows nothing of the library, which serves or watches it. What
torch, the library, the phantom and the commands from outside say of it, at its height and at its
end."""

import ctypes
import json
import os
import subprocess

import torch
from torch import nn

import gpu

preloaded = "libgruyere" in os.environ["LD_PRELOAD"]
library = ctypes.CDLL(os.environ["GRUYERE_TEST_LIBRARY"])


def outside(*arguments):
    """A command, without what is set for this program. Its answer."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LD_", "PHANTOM_", "GRUYERE_CONF"))
    }
    ran = subprocess.run(
        [os.environ["GRUYERE_TEST_COMMAND"], *arguments],
        env=clean,
        stdout=subprocess.PIPE,
        text=True,
    )
    return ran.stdout if ran.returncode == 0 else None


def state():
    torch.cuda.synchronize()
    stats = gpu.Stats(size=ctypes.sizeof(gpu.Stats))
    # Asked in a process that has no heap, it would make one.
    known = preloaded and library.gruyere_stats(0, ctypes.byref(stats)) == 0
    return {
        "torch": torch.cuda.memory_reserved(),
        "phantom": gpu.phantom.phantom_physical(0),
        "plain": gpu.phantom.phantom_plain(0),
        "live": stats.live if known else None,
        "reserved": stats.reserved if known else None,
        "bad_frees": stats.bad_frees,
    }


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for step in range(6):
    tokens = torch.zeros(4, 64 + 16 * step, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.stream(side):
        copy = tokens.to(torch.float32)
    side.synchronize()
    del tokens, loss, copy
# Values that went through device memory.
numbers = torch.arange(100, dtype=torch.int32)
there = numbers.cuda()
arrived = torch.equal(there.cpu(), numbers)
high = state()
top = outside("top", "--json")
seen = (
    [process for process in json.loads(top)["processes"] if process["pid"] == os.getpid()]
    if top
    else []
)
picture = outside("map", str(os.getpid()), "--json")
del model, optimizer, layer
torch.cuda.empty_cache()
low = state()
print(json.dumps({
    "high": high, "low": low, "top": seen, "map": json.loads(picture) if picture else None,
    "arrived": arrived, "valid": library.gruyere_validate() if preloaded else None,
}))  # fmt: skip
