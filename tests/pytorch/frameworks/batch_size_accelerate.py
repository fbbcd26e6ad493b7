"""accelerate's find_executable_batch_size around a training function, and transformers' Trainer,
which uses it for auto_find_batch_size."""

import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

tried = []
accelerator = Accelerator()


@find_executable_batch_size(starting_batch_size=256)
def train(batch_size):
    tried.append(batch_size)
    accelerator.free_memory()
    layers = (
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(4)
    )
    model = nn.Sequential(nn.Embedding(100, 512), *layers)
    data = TensorDataset(torch.zeros(1024, 256, dtype=torch.long))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=batch_size)
    )
    for _, (x,) in zip(range(3), loader):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return batch_size


def trainer_finds_its_own():
    shape = dict(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=8000,
    )
    model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).cuda()
    tokens = torch.zeros(256, dtype=torch.long)
    data = [{"input_ids": tokens, "labels": tokens}] * 1024
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=128,
            auto_find_batch_size=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
    return trainer._train_batch_size, trainer.state.global_step


def main():
    batch = train()
    accelerator.free_memory()
    size, steps = trainer_finds_its_own()
    print(json.dumps({"batch": batch, "tried": tried, "trainer": size, "trainer_steps": steps}))


if __name__ == "__main__":
    main()
