"""No optimizer: the program updates its weights by hand; the batch is too large.

cause: too_large
device: 4 GiB
ends: oom
never: no_grad|inference_mode|retain_graph|\.item\(\)
"""

import torch

weights = [torch.randn(2048, 2048, device="cuda", requires_grad=True) for _ in range(12)]
for step in range(20):
    x = torch.randn(4096 * (1 + step), 2048, device="cuda")
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.square().mean().backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None
    del x
