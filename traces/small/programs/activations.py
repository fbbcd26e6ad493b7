"""Activations that leave for the host in the forward pass and come back in the backward pass, on a
stream of their own: torchtune's OffloadActivations as it is, on LoRA of a decoder with the parts of
Llama. Its module alone is loaded: the package wants data sets and quantised weights, which the
program has not."""

import importlib.metadata
import importlib.util
import logging
import sys
import types

import llama
import recorder
import torch
from torch import nn


def offloading():
    """torchtune's module, with the three names that it takes from elsewhere."""
    names = {
        "torchao": {},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": lambda level: logging.getLogger("torchtune")},
    }
    for name, values in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    distribution = importlib.metadata.distribution("torchtune")
    file = distribution.locate_file("torchtune/training/_activation_offloading.py")
    spec = importlib.util.spec_from_file_location("activation_offloading", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Adapted(nn.Module):
    """LoRA beside a layer that does not learn."""

    def __init__(self, linear, rank=16):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = llama.Llama(layers=12, width=1024, inner=2816).requires_grad_(False)
    for layer in model.layers:
        for owner, names in ((layer.attention, "query key value out"), (layer, "gate up down")):
            for name in names.split():
                setattr(owner, name, Adapted(getattr(owner, name)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
away = offloading().get_act_offloading_ctx_manager(model, True)
for _ in recorder.steps(4):
    with away:
        loss = llama.loss_of(model, recorder.blank(2, recorder.draw.randrange(512, 1024, 64)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
