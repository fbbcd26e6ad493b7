"""What is known of tensors on the device: the host computes it, and every way of reading it gives
what a GPU would give. What a kernel may have changed is not known."""

import pytest

from conftest import GRUYERE, ROOT
from dry_runs import dryrun, told
from gruyere._dryrun import computed, masks

BEGIN = """
import json
import torch
from gruyere._dryrun.answers import Answers

answers = Answers()
answers.watch()
knows = answers.computed.knows
"""


def on_stand_in(phantom, code, values="random:1"):
    settings = {"PHANTOM_VALUES": values, "PHANTOM_DRYRUN": 1}
    settings |= {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    ran = phantom.run(None, code=BEGIN + code, **settings)
    assert ran.code == 0, ran.out + ran.err
    return ran


# Each is computed on the device and, as the measure, on the host.
SAME = """
boxes = torch.tensor([[10.0, 20, 30, 50], [5, 5, 9, 9], [0, 1, 7, 3]])
ids = torch.tensor([[4, 7, 7, 0], [9, 3, 0, 0], [1, 5, 2, 8]])
flags = torch.tensor([True, False, True])
ways = {
    "degenerate": lambda b, i, f: (b[:, 2:] <= b[:, :2]).any(),
    "scaled": lambda b, i, f: torch.stack([one * 1.5 for one in b.unbind(1)], dim=1),
    "areas": lambda b, i, f: (b[:, 3] - b[:, 1]) * (b[:, 2] - b[:, 0]),
    "ratio": lambda b, i, f: b.new_full((), 3.0) / torch.tensor(7.0, device=b.device),
    "lengths": lambda b, i, f: (i != 0).sum(-1),
    "starts": lambda b, i, f: torch.nn.functional.pad((i != 0).sum(-1).cumsum(0), (1, 0)),
    "difference": lambda b, i, f: (i[1:] - i[:-1]).abs().max(),
    "sorted": lambda b, i, f: i.sort(dim=1, descending=True).values,
    "largest": lambda b, i, f: i.max(dim=1).indices,
    "masked": lambda b, i, f: b[f],
    "selected": lambda b, i, f: i.masked_select(i > 3),
    "places": lambda b, i, f: torch.where(i == 7)[1],
    "nonzero": lambda b, i, f: i.nonzero(),
    "joined": lambda b, i, f: torch.cat([i, torch.zeros_like(i)], 1)[:, ::2].T.reshape(-1),
    "causal": lambda b, i, f: torch.ones(4, 4, dtype=torch.bool, device=b.device).tril(),
    "table": lambda b, i, f: torch.arange(10, device=b.device)[i],
    "clamped": lambda b, i, f: b.clamp(min=3, max=20).round().long(),
    "mean": lambda b, i, f: i.float().mean(),
    "half": lambda b, i, f: b.half() / 3,
    "not": lambda b, i, f: ~f | (i[:, 0] > 5),
    "where": lambda b, i, f: torch.where(f[:, None], i, -1),
    "written": lambda b, i, f: torch.empty_like(i).fill_(7).copy_(i.float()).zero_() + i,
    "in place": lambda b, i, f: i.clone().masked_fill_(i > 5, -1).mul_(2),
    "assigned": lambda b, i, f: assigned(i),
    "assigned at places": lambda b, i, f: placed(i, [2, 0]),
    "a view": lambda b, i, f: b.view(-1)[::3].flip(0) // 2,
    "none": lambda b, i, f: b[b[:, 0] > 99] * 2,
}


def placed(ids, places):
    ids = ids.clone()
    ids[torch.tensor(places, device=ids.device)] = ids[:2] + 1
    return ids


def assigned(ids):
    mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    for row, count in zip(mask, (3, 1, 4)):
        row[:count] = True
    mask[2] = False
    return mask


for name, way in ways.items():
    wanted, found = way(boxes, ids, flags), way(boxes.cuda(), ids.cuda(), flags.cuda())
    assert knows(found), name
    assert found.shape == wanted.shape and found.tolist() == wanted.tolist(), (name, found.cpu())
    assert (found.cpu().numpy() == wanted.numpy()).all(), name
    if wanted.numel() == 1:
        assert found.item() == wanted.item() and float(found) == float(wanted), name
    assert torch.equal(found, wanted.cuda()), name
many = torch.randint(0, 9, (64, 8192))
assert many.cuda().eq(3).sum().item() == many.eq(3).sum().item()
"""


@pytest.mark.parametrize("values", ["zeros", "random:1"])
def test_what_is_computed_from_known_values_is_read_as_on_a_gpu(phantom, values):
    on_stand_in(phantom, SAME, values)


# Each gives a tensor that a kernel may have written to, and whose values are not known.
LOST = """
import torch.nn.functional as F

seen = torch.empty(4, device="cuda")
ways = {
    "in place": lambda x: x.add_(seen),
    "of a view": lambda x: (x[1:].add_(seen[1:]), x)[1],
    "before": lambda x: (x.view(2, 2), x.mul_(seen))[0],
    "of data": lambda x: (x.data.add_(seen), x)[1],
    "twice at one place": lambda x: twice(x),
    "copied to a type that does not hold it": lambda x: torch.zeros_like(x, dtype=torch.int8).copy_(
        x * 1e9
    ),
    "a number that no integer holds": lambda x: (x * 1e30).long(),
    "an item": lambda x: (x.__setitem__(0, seen[0]), x)[1],
    "a copy": lambda x: x.copy_(seen),
    "out": lambda x: torch.add(seen, 1, out=x),
    "an operator of no list": lambda x: F.relu_(x),
    "and its copy": lambda x: F.relu_(x).clone(),
    "computed with": lambda x: x + seen,
    "filled by a kernel": lambda x: x.masked_fill(seen > 0, 2),
    "scattered": lambda x: torch.diag_embed(seen),
    "random": lambda x: torch.rand_like(x),
    "dropped": lambda x: F.dropout(x, 0.5),
    "several": lambda x: (torch._foreach_zero_([x]), x)[1],
    "a mean of batches": lambda x: normalized(x),
    "what is trained": lambda x: trained(x),
    "reused": lambda x: reused(x),
    "of data that was replaced": lambda x: (setattr(x, "data", seen), x)[1],
}


def twice(x):
    x[torch.zeros(2, dtype=torch.long, device="cuda")] = torch.tensor([5.0, 6.0]).cuda()
    return x


def normalized(x):
    F.batch_norm(seen.view(1, 4).expand(2, 4), x, x.clone(), training=True)
    return x


def trained(x):
    weight = torch.nn.Parameter(x)
    with torch.no_grad():
        weight -= seen
    return weight.data


def reused(x):
    del x
    return torch.empty(4, device="cuda")


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        F.relu_(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


ways["a function of its own"] = lambda x: Twice.apply(x)
for name, way in ways.items():
    known = torch.tensor([1.0, 2, 3, 4]).cuda()
    assert knows(known)
    assert not knows(way(known)), name
    del known
model = torch.nn.Linear(4, 4, device="cuda")
for fused in (False, True):
    model.weight = torch.nn.Parameter(torch.ones(4, 4).cuda())
    assert knows(model.weight.data)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    model(torch.ones(4, device="cuda")).sum().backward()
    optimizer.step()
    assert not knows(model.weight.data) and not knows(model.weight.data.clone())
    states = optimizer.state[model.weight]
    assert not knows(states["exp_avg"])
with torch.inference_mode():
    assert not knows(torch.tensor([1]).cuda())


class Own(torch.Tensor):
    pass


assert not knows(torch.ones(4).cuda().as_subclass(Own) + 1)
# As a kernel of Triton's has had it, which counts no version.
count = torch.zeros(1, device="cuda", dtype=torch.int32)
answers.computed.forget(count)
assert not knows(count) and count.item() != 0
# A graph's replays write to what was known before.
count = torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    count += 1
    total = count.clone()
count.zero_()
assert not knows(count) and not knows(total)
"""


def test_what_a_kernel_may_have_written_is_unknown(phantom):
    on_stand_in(phantom, LOST)


# The same requests as without any of this; modes of the program's see its own operators alone.
UNSEEN = """
import gc, weakref
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


def work(ids):
    lengths = (ids != 0).sum(-1)
    lengths += 1
    return torch.cat([lengths, lengths.cumsum(0)]).max()


ids = torch.tensor([[3, 0], [1, 2]])
on_device = ids.cuda()
with Seen() as host:
    work(ids)
before = torch.cuda.memory_stats()
with Seen() as device:
    found = work(on_device)
    assert found.item() == 5
assert device.seen == [*host.seen, "aten._local_scalar_dense.default"], device.seen
freed = weakref.ref(found)
del found
gc.collect()
assert freed() is None
after = torch.cuda.memory_stats()
assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]

# Compiled, scripted, traced and mapped programs are as before.
def check(x):
    return (x[1:] - x[:-1]).clamp(min=0).sum() + torch.zeros(2).sum()


def padded(x):
    return torch.nn.functional.pad(torch.cat([x]), (1, 0))


x = torch.tensor([1.0, 3.0])
assert torch.compile(check, backend="eager", fullgraph=True)(x) == 2
assert torch.jit.trace(check, x)(torch.tensor([1.0, 4.0])) == 3
traced = torch.jit.trace(lambda x: x + 1, x.cuda())
assert str(traced.graph).count("aten::") == 1, traced.graph
assert torch.jit.script(padded)(x).tolist() == [0, 1, 3]
assert torch.vmap(lambda row: (row > 1).any())(x[None].cuda()).shape == (1,)
assert torch.func.grad(lambda x: (x * x).sum())(x.cuda()).shape == (2,)
with torch.device("cuda"):
    assert (torch.ones(3) + 1).sum().item() == 6
"""


def test_nothing_is_allocated_or_kept_and_no_mode_of_the_programs_sees_it(phantom):
    (phantom.folder / "program.py").write_text(BEGIN + UNSEEN)
    settings = {"PHANTOM_VALUES": "zeros", "PHANTOM_DRYRUN": 1, "GRUYERE_LIBRARY": GRUYERE}
    ran = phantom.run(
        None,
        code="import program",
        PYTHONPATH=f"{phantom.folder}:{ROOT / 'python_loader'}",
        **settings,
    )
    assert ran.code == 0, ran.out + ran.err


# How many elements of masks are selected that are set at places, and of what is made of them.
PLACED = """
labels = torch.empty(1000, device="cuda", dtype=torch.long)


def placed(count, kind=torch.bool):
    mask = torch.zeros_like(labels, dtype=kind)
    mask[torch.randperm(1000, device="cuda")[:count]] = 1
    return mask


one, two = placed(100), placed(30, torch.uint8)
twice = placed(100)
twice[labels[:50]] = True
changed = placed(100)
changed ^= labels > 0
whole, rows = torch.zeros(4, 8, device="cuda", dtype=torch.bool), labels[:3]
whole[rows] = True
selected = {
    100: [one, one.clone(), one.to(torch.uint8), one | torch.zeros_like(one)],
    130: [one | two, torch.cat([one, two]), torch.stack([one, two.bool()])],
    150: [twice], 24: [whole],
    # Of these nothing is known.
    1000: [changed, one | 1, ~one, one | (labels > 0), labels, one == 0],
    2000: [one.view(1, -1) | torch.zeros(2, 1, dtype=torch.bool, device="cuda")],
}
for count, masks in selected.items():
    for number, mask in enumerate(masks):
        assert len(mask.nonzero()) == count, (count, number, len(mask.nonzero()))
with torch.inference_mode():
    assert len(one.to(torch.uint8).nonzero()) == 1000
"""


def test_a_mask_that_is_set_at_places_selects_at_most_as_many(phantom):
    on_stand_in(phantom, PLACED)


# A detector's training: boxes that are scaled and checked, and a sampler of 512 places.
DETECTOR = """
import torch

model = torch.nn.Linear(64, 64).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
boxes = torch.tensor([[10.0, 20.0, 30.0, 50.0], [5.0, 5.0, 9.0, 9.0]])
for _ in range(4):
    on_device = boxes.cuda()
    ratio = torch.tensor(800.0, device="cuda") / torch.tensor(600.0, device="cuda")
    scaled = torch.stack([side * ratio for side in on_device.unbind(1)], dim=1)
    assert not (scaled[:, 2:] <= scaled[:, :2]).any(), "a degenerate box"
    labels = model(torch.zeros(4096, 64, device="cuda")).argmax(1)
    chosen = torch.zeros_like(labels, dtype=torch.uint8)
    chosen[torch.where(labels > 1)[0][torch.randperm(4096, device="cuda")[:512]]] = 1
    rows = torch.empty(len(torch.where(chosen)[0]) << 18, dtype=torch.uint8, device="cuda")
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    opt.step()
"""


def test_a_detectors_boxes_are_checked_and_its_sampler_selects_as_many_as_it_sets(tmp_path):
    (tmp_path / "train.py").write_text(DETECTOR)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"))
    assert document["trust"]["reasons"] == []
    assert document["trust"]["answered"].keys() == {computed.KNOWN, masks.SELECTED}
    # 512 of 256 KiB, those of a step beside those of the one before; not 4,096.
    assert 128 << 20 <= document["peak"]["bytes"] < 512 << 20
