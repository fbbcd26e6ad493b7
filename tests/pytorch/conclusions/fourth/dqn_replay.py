"""DQN on frames: the replay buffer lives on the GPU, as deque(maxlen=100_000).

cause: grows
device: 512 MiB
ends: oom
never: no_grad|smaller batch
"""
import collections
import torch
from torch import nn
import torch.nn.functional as F

Transition = collections.namedtuple("Transition", "state action reward next_state")


class QNet(nn.Module):
    def __init__(self, actions=6):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, 4)
        self.conv2 = nn.Conv2d(32, 64, 4, 2)
        self.fc = nn.Linear(64 * 9 * 9, 512)
        self.out = nn.Linear(512, actions)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.out(F.relu(self.fc(x.flatten(1))))


class Replay:
    def __init__(self, capacity=100_000):
        self.memory = collections.deque(maxlen=capacity)

    def push(self, *transition):
        self.memory.append(Transition(*transition))

    def sample(self, n):
        rows = [self.memory[(7 * i) % len(self.memory)] for i in range(n)]
        return Transition(*[torch.stack(c) for c in zip(*rows)])


def observe():
    frame = torch.zeros(4, 84, 84)                 # from the emulator
    return frame.cuda()  # the cause


def main():
    online, target = QNet().cuda(), QNet().cuda()
    target.load_state_dict(online.state_dict())
    opt = torch.optim.Adam(online.parameters(), 1e-4)
    replay = Replay()
    state = observe()
    for frame in range(100_000):
        with torch.no_grad():
            action = online(state[None]).argmax(1)[0]
        next_state = observe()
        reward = torch.ones((), device="cuda")
        replay.push(state, action, reward, next_state)
        state = next_state
        if frame >= 256 and frame % 16 == 0:
            b = replay.sample(64)
            with torch.no_grad():
                goal = b.reward + 0.99 * target(b.next_state).max(1).values
            q = online(b.state).gather(1, b.action[:, None])[:, 0]
            opt.zero_grad()
            F.smooth_l1_loss(q, goal).backward()
            opt.step()


main()
