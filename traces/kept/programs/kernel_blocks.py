"""The kernel matrix of a Gaussian process in blocks, all of which are kept; conjugate gradients on
them, whose directions are kept for a low-rank root."""

import recorder
import torch

ROWS, BLOCK = 23_700, 1317
x = torch.randn(ROWS, 26, device="cuda")
y = torch.zeros(ROWS, 1, device="cuda")
blocks, directions = [], []
with torch.no_grad():
    for rows in x.split(BLOCK):
        far = (rows.square().sum(1, keepdim=True) + x.square().sum(1) - 2 * rows @ x.t()).clamp(
            min=0
        )
        root = (5 * far).sqrt()
        blocks.append(((1 + root + root.square() / 3) * (-root).exp()))
        recorder.step()
    solution, residue = torch.zeros_like(y), y
    p, old = residue, residue.square().sum()
    for _ in recorder.steps(60):
        product = torch.cat([b @ p for b in blocks]) + 0.1 * p
        alpha = old / (p * product).sum()
        solution, residue = solution + alpha * p, residue - alpha * product
        new = residue.square().sum()
        new.item()
        directions.append(p)
        p, old = residue + new / old * p, new
        recorder.step()
