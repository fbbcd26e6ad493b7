"""transformers: Trainer on a LLaMA of random weights, three steps."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=8000, use_cache=False,
)  # fmt: skip
tokens = torch.arange(512) % 8000
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(folder, max_steps=3, bf16=True, save_strategy="no", report_to="none"),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64,
    ).train()
