"""Nothing is wrong with it."""

from common import Training, is_killed

training = Training()
for step in range(24):
    training.step()
is_killed()
