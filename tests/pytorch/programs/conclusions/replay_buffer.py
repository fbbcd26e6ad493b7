"""A replay buffer of eight batches, which has been full for long."""

from collections import deque

from common import MIB, Training, is_killed, tensor

training = Training()
replay = deque(maxlen=8)
for step in range(40):
    replay.append(tensor(64 * MIB))  # what is level
    training.step()
is_killed()
