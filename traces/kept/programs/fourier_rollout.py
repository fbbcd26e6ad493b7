"""A Fourier neural operator goes on from its own prediction of a turbulent flow; the vorticity of
every step is kept, for the spectra at the end."""

import recorder
import torch
from torch import nn

MODES, WIDTH, N = 24, 40, 500
lift, last = (
    nn.Conv2d(3, WIDTH, 1).cuda(),
    nn.Sequential(nn.Conv2d(WIDTH, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1)).cuda(),
)
weights = [
    torch.zeros(2, WIDTH, WIDTH, MODES, MODES, dtype=torch.cfloat, device="cuda") for _ in range(4)
]
locals_ = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(4)]).cuda()
place = (
    torch.stack(torch.meshgrid(torch.linspace(0, 1, N), torch.linspace(0, 1, N), indexing="ij"))
    .cuda()
    .expand(5, -1, -1, -1)
)
flow, film = torch.zeros(5, 1, N, N, device="cuda"), []
with torch.no_grad():
    for _ in recorder.steps(150):
        x = lift(torch.cat([flow, place], 1))
        for weight, local in zip(weights, locals_):
            f = torch.fft.rfft2(x)
            g = torch.zeros_like(f)
            g[:, :, :MODES, :MODES] = torch.einsum(
                "bixy,ioxy->boxy", f[:, :, :MODES, :MODES], weight[0]
            )
            g[:, :, -MODES:, :MODES] = torch.einsum(
                "bixy,ioxy->boxy", f[:, :, -MODES:, :MODES], weight[1]
            )
            x = nn.functional.gelu(torch.fft.irfft2(g, s=(N, N)) + local(x))
        flow = flow + 0.1 * last(x)
        film.append(flow)
        recorder.step()
