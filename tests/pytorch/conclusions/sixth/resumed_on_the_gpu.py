"""A checkpoint is loaded straight onto the GPU and kept alive.

cause: too_large
device: 4GiB
ends: oom
never: To do: a smaller batch
"""

import os
import tempfile

import torch
import torch.nn as nn


def build():
    with torch.device("cuda"):
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True),
            12,
            enable_nested_tensor=False,
        )


def main():
    path = os.path.join(tempfile.mkdtemp(), "ck.pt")
    m = build()
    o = torch.optim.AdamW(m.parameters(), 1e-4)
    m(torch.randn(2, 16, 1024, device="cuda")).sum().backward()
    o.step()
    torch.save({"model": m.state_dict(), "opt": o.state_dict()}, path)
    del m, o
    model = build()
    opt = torch.optim.AdamW(model.parameters(), 1e-4)
    ck = torch.load(path, map_location="cuda")
    model.load_state_dict(ck["model"])
    opt.load_state_dict(ck["opt"])
    for step in range(50):
        x = torch.randn(16, 256, 1024, device="cuda")
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    main()
