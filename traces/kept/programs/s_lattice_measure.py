"""A lattice Boltzmann flow whose measures are taken on a second stream: vorticity and pressure of
every step are kept, the state is handed over by record_stream."""

import recorder
import torch

measure, main = torch.cuda.Stream(), torch.cuda.current_stream()
NX, NY = 1501, 903
shifts = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
weights = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, device="cuda")[:, None, None]
c = torch.tensor(shifts, dtype=torch.float, device="cuda")
f = weights.expand(9, NX, NY).contiguous()
kept = []
with torch.no_grad():
    for _ in recorder.steps(70):
        f = torch.stack([f[i].roll(s, (0, 1)) for i, s in enumerate(shifts)])
        rho = f.sum(0)
        u = torch.einsum("ia,ixy->axy", c, f) / rho
        cu = torch.einsum("ia,axy->ixy", c, u)
        equal = weights * rho * (1 + 3 * cu + 4.5 * cu.square() - 1.5 * u.square().sum(0))
        f = f + (equal - f) / 0.6
        measure.wait_stream(main)
        with torch.cuda.stream(measure):
            u.record_stream(measure)
            rho.record_stream(measure)
            curl = u[1].roll(-1, 0) - u[1].roll(1, 0) - u[0].roll(-1, 1) + u[0].roll(1, 1)
            kept.append((curl, (rho / 3).half()))
        recorder.step()
