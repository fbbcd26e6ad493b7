"""Lightning: the language model that it ships for its demonstrations, by its Trainer."""

import tempfile

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.demos import Transformer
from torch.nn.functional import nll_loss


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=5000)

    def training_step(self, tokens, _):
        return nll_loss(self.model(tokens, tokens), tokens.view(-1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


with tempfile.TemporaryDirectory() as folder:
    Trainer(
        accelerator="gpu", devices=1, max_steps=3, default_root_dir=folder, logger=False,
        precision="bf16-mixed", enable_progress_bar=False,
    ).fit(Language(), torch.utils.data.DataLoader(torch.zeros(64, 128).long(), 16))  # fmt: skip
