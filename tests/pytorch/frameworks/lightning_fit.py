"""Lightning: a module fitted and validated by the Trainer, in mixed precision, with its monitor of
the device's memory."""

import json
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import DeviceStatsMonitor
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 10))

    def training_step(self, batch, _):
        x, labels = batch
        loss = nn.functional.cross_entropy(self.layers(x), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, labels = batch
        self.log("accuracy", (self.layers(x).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(256, 128), torch.randint(0, 10, (256,)))
    loader = DataLoader(
        data, batch_size=16, num_workers=2, persistent_workers=True, pin_memory=True
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=2,
            default_root_dir=folder,
            logger=CSVLogger(folder),
            log_every_n_steps=4,
            callbacks=[DeviceStatsMonitor()],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), loader, DataLoader(data, batch_size=32))
    print(json.dumps({"steps": trainer.global_step, "device": str(trainer.strategy.root_device)}))


if __name__ == "__main__":
    main()
