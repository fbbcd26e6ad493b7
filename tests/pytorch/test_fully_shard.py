"""FSDP: sharded gradients come from the stream of their reduction, and the optimizer reads them on
the program's own. torch's allocator gives such a block to no other stream, so FSDP need not tell it
of the optimizer; ours must be told."""

import pytest

# A step; then, with the optimizer's kernels still to run, the gradients are freed, and a loader's
# stream asks for as much. `got`: bytes of the loader's batch where a gradient was.
STEP = """
import gruyere, json, torch
gruyere.enable()
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
with torch.device("cuda"):
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))
{shard}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.cuda.Stream()
got = []
for step in range(3):
    model(torch.zeros(8, 4096, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    grads = [parameter.grad for parameter in model.parameters()]
    grads = [getattr(grad, "_local_tensor", grad) for grad in grads]
    places = [(grad.data_ptr(), grad.untyped_storage().nbytes()) for grad in grads]
    del grads
    for _ in range(50):
        optimizer.step()
    optimizer.zero_grad()
    busy = not torch.cuda.current_stream().query()
    with torch.cuda.stream(loader):
        batches = [torch.empty(size, dtype=torch.uint8, device="cuda") for _, size in places]
    assert busy and not torch.cuda.current_stream().query()
    for batch in batches:
        start, end = batch.data_ptr(), batch.data_ptr() + batch.nbytes
        got.append(sum(max(0, min(end, at + size) - max(start, at)) for at, size in places))
    torch.cuda.synchronize()
    del batch, batches
print(json.dumps(dict(got=sum(got))))
"""


FSDP2 = """
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard
for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
for number, layer in enumerate(model):
    model[number] = FSDP(layer, device_id=0)
model = FSDP(model, device_id=0)
"""


@pytest.mark.parametrize("shard", [FSDP2, FSDP1], ids=["fsdp2", "fsdp1"])
def test_gradients_serve_no_other_stream_before_the_optimizer_has_read_them(installed, shard):
    lags = {"PHANTOM_KERNEL_NS": "1000000", "PHANTOM_MEMORY": "8GiB", "WORLD_SIZE": "2"}
    ran = installed.code(STEP.replace("{shard}", shard), **lags).check().report
    assert ran["got"] == 0, ran
