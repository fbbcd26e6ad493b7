"""The points of a scene, and so weights and states, grow every five steps.

cause: too_large
also: grows
device: 1 GiB
ends: oom
never: lengths
"""

import torch

P = {
    "xyz": torch.nn.Parameter(torch.randn(100_000, 3, device="cuda")),
    "sh": torch.nn.Parameter(torch.randn(100_000, 48, device="cuda")),
}
opt = torch.optim.Adam([{"params": [p], "name": k} for k, p in P.items()], lr=1e-3)


def densify():
    for g in opt.param_groups:
        old = g["params"][0]
        st = opt.state.pop(old)
        new = torch.nn.Parameter(torch.cat([old.data, old.data[: old.shape[0] // 3]]))
        for k in ("exp_avg", "exp_avg_sq"):
            st[k] = torch.cat([st[k], torch.zeros_like(old.data[: old.shape[0] // 3])])
        g["params"][0] = new
        opt.state[new] = st
        P[g["name"]] = new


for step in range(200):
    cols = (P["sh"] * P["xyz"].norm(dim=1, keepdim=True)).sigmoid()
    loss = cols.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        densify()
