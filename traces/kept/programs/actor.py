"""An actor on a stream of its own gathers experience while a learner trains on the last lot."""

import recorder
import torch
from torch import nn

net = nn.Sequential(
    nn.Conv2d(12, 48, 4, 2),
    nn.ReLU(),
    nn.Conv2d(48, 96, 4, 2),
    nn.ReLU(),
    nn.Flatten(),
    nn.LazyLinear(512),
    nn.ReLU(),
    nn.Linear(512, 16),
).cuda()
net(torch.zeros(1, 12, 96, 96, device="cuda"))
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
acting, main = torch.cuda.Stream(), torch.cuda.current_stream()


def gather():
    lot = []
    with torch.cuda.stream(acting), torch.no_grad():
        for _ in range(20):
            seen = torch.rand(160, 12, 96, 96, device="cuda")
            logits = net(seen)
            act = logits.softmax(-1).multinomial(1)
            lot.append((seen.to(torch.float16), act, torch.rand(160, device="cuda")))
    return lot


lot = gather()
for _ in recorder.steps(10):
    main.wait_stream(acting)
    for part in lot:
        for t in part:
            t.record_stream(main)
    seen = torch.cat([p[0] for p in lot])
    act = torch.cat([p[1] for p in lot])
    gain = torch.cat([p[2] for p in lot])
    acting.wait_stream(main)
    lot = gather()
    for part in torch.randperm(len(seen), device="cuda").chunk(5):
        loss = -(
            net(seen[part].float()).log_softmax(-1).gather(1, act[part]).squeeze(1) * gain[part]
        ).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    recorder.step()
