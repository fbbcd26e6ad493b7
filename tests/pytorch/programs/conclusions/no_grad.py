"""An evaluation that keeps its predictions, and forgot torch.no_grad()."""

from common import Training, is_killed

training = Training()


def evaluate():
    predictions = []
    for _ in range(30):
        predictions.append(training.model(training.batch()))  # the suspect
    is_killed()


for step in range(6):
    training.step()
evaluate()
