"""A forward hook keeps what each layer returns, for statistics that nobody clears."""

from common import Training, is_killed

training = Training()
outputs = []
for module in training.model:
    module.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))


def train():
    loss = training.model(training.batch()).square().mean()  # the suspect
    loss.backward()
    training.end_step()


for step in range(16):
    train()
is_killed()
