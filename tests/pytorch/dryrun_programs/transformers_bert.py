"""transformers: Trainer on a BERT that classifies, of random weights, three steps with evaluation
and a checkpoint."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
)
data = [{"input_ids": torch.arange(128), "labels": number % 2} for number in range(64)]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            folder, max_steps=3, eval_strategy="steps", eval_steps=2, save_steps=3,
            report_to="none",
        ),
        train_dataset=data,
        eval_dataset=data[:8],
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate()["eval_loss"])
