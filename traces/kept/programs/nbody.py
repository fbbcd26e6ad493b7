"""Bodies under gravity: positions and velocities of each step stay."""

import recorder
import torch

torch.set_grad_enabled(False)
N = 150_000
p, v = torch.randn(N, 3, device="cuda"), torch.zeros(N, 3, device="cuda")
track = []
for t in recorder.steps(220):
    anchors = p[torch.randint(N, (96,), device="cuda")]
    d = anchors[None] - p[:, None]
    inv = (d.pow(2).sum(-1) + 0.01).rsqrt()
    a = (d * inv.pow(3)[..., None]).sum(1)
    v = v + 1e-4 * a
    p = p + 1e-2 * v
    track.append(torch.cat([p, v], 1))
    recorder.step()
torch.stack([x[:, :3].mean(0) for x in track]).sum().item()
