"""A pseudo-spectral solver of three-dimensional turbulence with Runge-Kutta steps and spectra now
and then."""

import recorder
import torch

N = 96
k = torch.fft.fftfreq(N, 1 / N, device="cuda")
kz = torch.fft.rfftfreq(N, 1 / N, device="cuda")
K = torch.stack(torch.meshgrid(k, k, kz, indexing="ij"))
K2 = (K**2).sum(0)
P = torch.where(K2 == 0, torch.ones_like(K2), K2).reciprocal()
dealias = (K.abs() < N / 3).all(0)
shell = K2.sqrt().round().long().clamp(max=N)
NU, DT = 1e-3, 2e-3


def curl(u):
    return 1j * torch.stack(
        [K[1] * u[2] - K[2] * u[1], K[2] * u[0] - K[0] * u[2], K[0] * u[1] - K[1] * u[0]]
    )


def rhs(u_hat):
    u = torch.fft.irfftn(u_hat, s=(N, N, N), dim=(1, 2, 3))
    w = torch.fft.irfftn(curl(u_hat), s=(N, N, N), dim=(1, 2, 3))
    cross = torch.fft.rfftn(torch.linalg.cross(u, w, dim=0), dim=(1, 2, 3)) * dealias
    pressure = (K * cross).sum(0) * P
    return cross - K * pressure - NU * K2 * u_hat


def rk4(u):
    a = rhs(u)
    b = rhs(u + DT / 2 * a)
    c = rhs(u + DT / 2 * b)
    d = rhs(u + DT * c)
    return u + DT / 6 * (a + 2 * b + 2 * c + d)


u_hat = torch.fft.rfftn(torch.randn(3, N, N, N, device="cuda"), dim=(1, 2, 3))
u_hat = (u_hat - K * (K * u_hat).sum(0) * P) * dealias
spectra, slices = [], []
for step in recorder.steps(16):
    for _ in range(2):
        u_hat = rk4(u_hat)
    if step % 4 == 3:
        energy = 0.5 * (u_hat.abs() ** 2).sum(0)
        spectra.append(
            torch.zeros(N + 1, device="cuda").index_add_(0, shell.flatten(), energy.flatten())
        )
        w = torch.fft.irfftn(curl(u_hat), s=(N, N, N), dim=(1, 2, 3))
        slices.append(w.norm(dim=0)[:, :, N // 2].cpu())
    recorder.step()
