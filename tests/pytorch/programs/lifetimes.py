"""What the package knows of lifetimes and steps in a real program, by optimiser:
`lifetimes.py KIND`.

Reports the bytes of parameters and of optimiser states; what is live by lifetime once the model is
on the device, and at the end; what lies at the end in memory of which lifetime; and the steps
counted."""

import copy
import io
import sys

import torch
from torch import nn

import gpu
import gruyere

gruyere.enable()

STEPS = 5


def transformer():
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.Sequential(
        nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1000)
    )


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that has another and was never initialised as one."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.inner.step() if closure is None else self.inner.step(closure)


class Lookahead(torch.optim.Optimizer):
    """An optimiser whose step has another's inside."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                state["slow"].lerp_(parameter.detach(), 0.5)


def optimisers(kind, model):
    parameters = list(model.parameters())
    half = len(parameters) // 2
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    return {
        "adamw": lambda: [adamw(parameters, foreach=False)],
        "foreach": lambda: [adamw(parameters, foreach=True)],
        "fused": lambda: [adamw(parameters, fused=True)],
        "momentum": lambda: [sgd(parameters, 0.1, momentum=0.9)],
        "plain": lambda: [sgd(parameters, 0.1)],
        "lbfgs": lambda: [torch.optim.LBFGS(parameters, max_iter=2, history_size=3)],
        "several": lambda: [adamw(parameters[:half]), sgd(parameters[half:], 0.1, momentum=0.9)],
        "each": lambda: [adamw([parameter]) for parameter in parameters],
        "scaler": lambda: [adamw(parameters)],
        "wrapped": lambda: [Wrapping(adamw(parameters))],
        "nested": lambda: [Lookahead(adamw(parameters))],
        "construct": lambda: [adamw(parameters)],
        "compiled": lambda: [adamw(parameters)],
        "sharded": lambda: [adamw(parameters)],
        "loaded": lambda: [adamw(parameters)],
        "explicit": lambda: [adamw(parameters)],
        "copied": lambda: [adamw(parameters)],
        "unpickled": lambda: [adamw(parameters)],
    }[kind]()


def storages(things):
    """Address to bytes of the CUDA storages of tensors in `things`."""
    if hasattr(things, "to_local"):
        things = things.to_local()
    if isinstance(things, torch.Tensor):
        storage = things.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if things.is_cuda and storage.nbytes() else {}
    found = {}
    for thing in (
        things.values()
        if isinstance(things, dict)
        else things
        if isinstance(things, (list, tuple))
        else ()
    ):
        found |= storages(thing)
    return found


def shard(model):
    """FSDP2 over eight ranks of which this is the only one: parameters and states are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        # Where torch 2.4 and 2.5 have it.
        from torch.distributed._composable.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cuda", (8,))
    for layer in model[1].layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model, chosen, scaler=None, explicit=False, compiled=False):
    def take(optimiser):
        optimiser.step()

    if compiled:
        take = torch.compile(take, backend="eager")
    for step in range(STEPS):
        tokens = torch.zeros(4, 64, dtype=torch.long, device="cuda")

        def closure():
            for optimiser in chosen:
                optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if any(isinstance(optimiser, torch.optim.LBFGS) for optimiser in chosen):
            chosen[0].step(closure)
        else:
            closure()
            for optimiser in chosen:
                take(optimiser) if scaler is None else scaler.step(optimiser)
        if scaler is not None:
            scaler.update()
        if explicit:
            gruyere.step()
    for optimiser in chosen:
        optimiser.zero_grad()


def main(kind):
    torch.manual_seed(0)
    if kind == "construct":
        with torch.device("cuda"):
            model = transformer()
    elif kind == "copied":
        # The original is not trained, and goes.
        model = copy.deepcopy(transformer().cuda())
    elif kind == "unpickled":
        file = io.BytesIO()
        torch.save(transformer(), file)
        file.seek(0)
        model = torch.load(file, map_location="cuda", weights_only=False)
    else:
        model = transformer().cuda()
    if kind == "sharded":
        shard(model)
    moved = live()
    chosen = optimisers(kind, model)
    if kind == "loaded":
        train(model, chosen)
        state = {key: value for key, value in chosen[0].state_dict().items()}
        state = torch.utils._pytree.tree_map(
            lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, state
        )
        chosen[0].load_state_dict(state)
        del state
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0) if kind == "scaler" else None
    train(model, chosen, scaler, explicit=kind == "explicit", compiled=kind == "compiled")
    torch.cuda.synchronize()
    parameters = storages(list(model.parameters()) + list(model.buffers()))
    inner = [optimiser.inner for optimiser in chosen if hasattr(optimiser, "inner")]
    states = storages([dict(optimiser.state) for optimiser in chosen + inner])
    gpu.report(
        parameters=sum(map(gpu.rounded, parameters.values())),
        states=sum(map(gpu.rounded, states.values())),
        moved=moved,
        live=live(),
        placed=gpu.placed(),
        steps=gpu.from_outside()["devices"][0]["gauges"]["step"],
        valid=gpu.library.gruyere_validate() == 0,
    )


def live():
    """Live bytes by lifetime, as another process reads them."""
    lifetimes = gpu.from_outside()["devices"][0]["lifetimes"]
    return {name: counts["live_bytes"] for name, counts in lifetimes.items()}


main(sys.argv[1])
