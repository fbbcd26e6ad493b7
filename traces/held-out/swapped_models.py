"""Several vision models take turns on a card: the one asked for is copied in from pinned memory on
a stream."""

import random

import recorder
import torch
from torch import nn

rng = random.Random(6)
loading = torch.cuda.Stream()


def vit(dim, depth, patch):
    layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, batch_first=True, norm_first=True)
    return (
        nn.ModuleDict(
            {
                "patch": nn.Conv2d(3, dim, patch, patch),
                "body": nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
                "head": nn.Linear(dim, 1000),
            }
        )
        .half()
        .eval()
    )


sizes = {
    "tiny": (192, 12, 16),
    "small": (384, 12, 16),
    "base": (768, 12, 16),
    "wide": (1024, 12, 32),
}
store = {}
for name, size in sizes.items():
    with torch.device("meta"):
        model = vit(*size)
    weights = {
        k: torch.zeros(v.shape, dtype=v.dtype).pin_memory() for k, v in model.state_dict().items()
    }
    store[name] = (model, weights)


def load(name):
    model, weights = store[name]
    with torch.cuda.stream(loading):
        there = {k: v.to("cuda", non_blocking=True) for k, v in weights.items()}
        done = loading.record_event()
    return model, there, done


@torch.inference_mode()
def classify(parts, x):
    y = parts["patch"](x).flatten(2).transpose(1, 2)
    return parts["head"](parts["body"](y).mean(1)).softmax(-1)


class Whole(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return classify(self.parts, x)


requests = [rng.choices(list(sizes), (4, 4, 3, 2))[0] for _ in range(200)]
resident, order = {}, []
for step in recorder.steps(24):
    name = requests[step % 200]
    if name not in resident:
        while len(resident) >= 2:
            del resident[order.pop(0)]
        resident[name] = load(name)
    if name in order:
        order.remove(name)
    order.append(name)
    model, weights, done = resident[name]
    torch.cuda.current_stream().wait_event(done)
    for w in weights.values():
        w.record_stream(torch.cuda.current_stream())
    side = rng.choice((224, 224, 256, 384)) // 32 * 32
    x = torch.zeros(rng.randrange(1, 33), 3, side, side, dtype=torch.half).cuda()
    prefixed = {"parts." + k: v for k, v in weights.items()}
    out = torch.func.functional_call(Whole(model), prefixed, (x,)).topk(5).indices.cpu()
    following = requests[(step + 1) % 200]
    if following not in resident and len(resident) < 2:
        resident[following] = load(following)
        order.append(following)
    recorder.step()
