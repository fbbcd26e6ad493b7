"""After a warm-up another optimiser takes over, and a scheduler keeps the first."""

import torch

from common import Training, is_killed

training = Training(layers=8, width=2048)
scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer)
for step in range(16):
    if step == 5:
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    training.step()
is_killed()
