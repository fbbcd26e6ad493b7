"""SWAG: mean, squares and the last deviations of the weights are kept, then thirty draws of weights
predict, and all of their predictions are kept."""

import recorder
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv1d(12, 128, 15, 2),
    nn.ReLU(),
    nn.Conv1d(128, 256, 9, 4),
    nn.ReLU(),
    nn.Conv1d(256, 640, 5, 4),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(4),
    nn.Flatten(),
    nn.Linear(2560, 700),
    nn.ReLU(),
    nn.Linear(700, 71),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
flat = nn.utils.parameters_to_vector
mean = flat(model.parameters()).detach().clone()
square, deviations, predictions = mean.square(), [], []
for step in recorder.steps(90):
    x, y = recorder.blank(64, 12, 2500, dtype=torch.float), torch.zeros(64, 71, device="cuda")
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    if step > 20 and step % 3 == 0:
        w = flat(model.parameters()).detach()
        n = len(deviations) + 1
        mean, square = (mean * n + w) / (n + 1), (square * n + w.square()) / (n + 1)
        deviations = [*deviations, w - mean][-18:]
    recorder.step()
with torch.no_grad():
    spread = (square - mean.square()).clamp(min=1e-30).sqrt()
    for _ in recorder.steps(30):
        low = sum(d * recorder.draw.gauss(0, 1) for d in deviations) / 6
        nn.utils.vector_to_parameters(
            mean + 0.7 * spread * torch.randn_like(mean) + low, model.parameters()
        )
        predictions.append(
            torch.cat(
                [
                    model(recorder.blank(128, 12, 2500, dtype=torch.float)).sigmoid()
                    for _ in range(3)
                ]
            )
        )
        recorder.step()
