"""transformers: Trainer on a ViT of random weights with gradient checkpointing, three steps."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

config = ViTConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4
)
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        ViTForImageClassification(config),
        TrainingArguments(
            folder, max_steps=3, gradient_checkpointing=True, save_strategy="no", report_to="none"
        ),
        train_dataset=[{"pixel_values": torch.zeros(3, 224, 224), "labels": 1}] * 64,
    ).train()
