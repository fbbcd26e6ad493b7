"""transformers: Seq2SeqTrainer on a T5 of random weights, three steps."""

import tempfile

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

config = T5Config(
    d_model=256, d_ff=1024, num_layers=4, num_heads=4, vocab_size=4000, decoder_start_token_id=0
)
row = {"input_ids": torch.arange(1, 257), "labels": torch.arange(1, 65)}
with tempfile.TemporaryDirectory() as folder:
    Seq2SeqTrainer(
        T5ForConditionalGeneration(config),
        Seq2SeqTrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            optim="adafactor", save_strategy="no", report_to="none",
        ),
        train_dataset=[row] * 64,
    ).train()  # fmt: skip
