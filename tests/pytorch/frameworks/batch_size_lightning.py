"""Lightning's batch-size finder, in both of its modes, and a fit with what it found."""

import json
import sys
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 8
        layers = (
            nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.layers = nn.Sequential(nn.Embedding(100, 512), *layers)

    def train_dataloader(self):
        return DataLoader(
            TensorDataset(torch.zeros(4096, 256, dtype=torch.long)), batch_size=self.batch_size
        )

    def training_step(self, batch, _):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main(mode):
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=3,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Model()
        found = Tuner(trainer).scale_batch_size(
            model, mode=mode, init_val=8, steps_per_trial=2, max_trials=8
        )
        trainer.fit(model)
    print(json.dumps({"batch": found, "steps": trainer.global_step}))


if __name__ == "__main__":
    main(sys.argv[1])
