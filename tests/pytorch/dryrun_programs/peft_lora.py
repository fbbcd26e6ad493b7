"""peft: LoRA on a LLaMA of random weights, by transformers' Trainer, three steps."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    hidden_size=1024, intermediate_size=2752, num_hidden_layers=8, num_attention_heads=16,
    vocab_size=16000, use_cache=False,
)  # fmt: skip
base = LlamaForCausalLM(config).to(torch.bfloat16)
tokens = torch.arange(512)
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj", "v_proj"])),
        TrainingArguments(folder, max_steps=3, bf16=True, save_strategy="no", report_to="none"),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64,
    ).train()
