"""An actor on a stream of its own fills a store of rollouts, the learner takes the finished ones:
what the actor made is recorded on the learner's stream."""

import collections

import recorder
import torch
from torch import nn

acting = torch.cuda.Stream()


def network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4480, 256),
        nn.ReLU(),
        nn.Linear(256, 16),
    ).cuda()


learner, actor = network(), network().requires_grad_(False)
optimizer = torch.optim.RMSprop(learner.parameters(), lr=3e-4)
store = collections.deque(maxlen=14)
for step in recorder.steps(90):
    with torch.cuda.stream(acting), torch.no_grad():
        seen, logits = [], []
        for _ in range(10):
            frame = (
                torch.zeros(34, 3, 72, 96, dtype=torch.uint8).pin_memory().cuda(non_blocking=True)
            )
            logits.append(actor(frame.float() / 255))
            seen.append(frame)
        store.append((torch.stack(seen), torch.stack(logits)))
        done = acting.record_event()
    if step >= 3:
        torch.cuda.current_stream().wait_event(done)
        seen, old = recorder.draw.choice(list(store)[:-1])
        for tensor in (seen, old):
            tensor.record_stream(torch.cuda.current_stream())
        new = learner(seen.flatten(0, 1).float() / 255).view_as(old)
        ratio = (new.log_softmax(-1) - old.log_softmax(-1)).exp().clamp(max=1)
        loss = -(ratio * new).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 10 == 9:
        acting.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(acting), torch.no_grad():
            for a, b in zip(actor.parameters(), learner.parameters()):
                a.copy_(b)
    recorder.step()
