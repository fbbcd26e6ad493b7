"""Losses are kept as tensors, and their graphs with them."""

from common import Training, is_killed

training = Training()
losses = []
for step in range(24):
    output = training.model(training.batch())  # the suspect
    loss = output.square().mean()
    losses.append(loss)
    loss.backward(retain_graph=True)
    training.end_step()
is_killed()
