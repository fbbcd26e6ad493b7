"""A backward that runs out of memory, and an end of the program that holds the interpreter's lock
for a second before Python is finalized. See README.md beside."""

import atexit

atexit.register(sum, range(6 * 10**7))  # before torch's own, so it runs last

import torch  # noqa: E402

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(20)]).cuda()
kept = []
while True:
    inputs = torch.zeros(4096, 2048, device="cuda", requires_grad=True)
    model(inputs).sum().backward()
    kept.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
