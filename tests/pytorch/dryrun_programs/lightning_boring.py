"""Lightning: the model that it ships for its own demonstrations, by its Trainer, three steps."""

import tempfile

from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

with tempfile.TemporaryDirectory() as folder:
    Trainer(
        accelerator="gpu", devices=1, max_steps=3, default_root_dir=folder, logger=False,
        precision="16-mixed", enable_progress_bar=False,
    ).fit(BoringModel())  # fmt: skip
