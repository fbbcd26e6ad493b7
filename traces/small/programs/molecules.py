"""Graph network, training: messages along the bonds of small molecules, batches of as many atoms as
they happen to have, forces as the gradient of the energy (so the gradient is differentiated)."""

import recorder
import torch
from torch import nn

WIDTH = 128


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(64, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.inside = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outside = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x, source, target, basis):
        messages = self.inside(x)[source] * self.filter(basis)
        return x + self.outside(torch.zeros_like(x).index_add(0, target, messages))


class SchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = nn.Embedding(100, WIDTH)
        self.interactions = nn.ModuleList([Interaction() for _ in range(6)])
        self.energy = nn.Sequential(nn.Linear(WIDTH, 64), nn.Softplus(), nn.Linear(64, 1))

    def forward(self, kinds, places, source, target):
        away = (places[source] - places[target]).norm(dim=-1)
        centres = torch.linspace(0, 10, 64, device="cuda")
        basis = torch.exp(-10 * (away[:, None] - centres) ** 2)
        x = self.atoms(kinds)
        for interaction in self.interactions:
            x = interaction(x, source, target, basis)
        return self.energy(x)


model = SchNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for _ in recorder.steps(8):
    sizes = [recorder.draw.randint(9, 60) for _ in range(32)]
    atoms, bonds = sum(sizes), sum(size * min(size - 1, 20) for size in sizes)
    kinds = recorder.blank(atoms, high=90)
    places = torch.zeros(atoms, 3).cuda().requires_grad_()
    source, target = recorder.blank(2, bonds, high=atoms)
    belongs = torch.repeat_interleave(torch.arange(32), torch.tensor(sizes)).cuda()
    energies = model(kinds, places, source, target)
    energy = torch.zeros(32, 1, device="cuda").index_add(0, belongs, energies)
    (forces,) = torch.autograd.grad(-energy.sum(), places, create_graph=True)
    loss = (energy**2).mean() + (forces**2).mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10)
    optimizer.step()
    recorder.step()
