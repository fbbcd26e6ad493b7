"""transformers: Trainer on a LLaMA, `trainer.py small` or `trainer.py 7b` (LLaMA-7B's shape: 6.7
billion parameters, bf16)."""

import json
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SHAPES = {
    "small": dict(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=2000,
    ),
    "7b": dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    ),
}


class Tokens(Dataset):
    def __init__(self, count, longest):
        self.count, self.longest = count, longest

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        # Unlike lengths, as texts have: memory is asked for in other sizes at each step.
        length = self.longest - self.longest // 16 * (index // 2 % 7)
        tokens = torch.full((length,), index)
        return {"input_ids": tokens, "labels": tokens}


def padded(items):
    longest = max(len(item["input_ids"]) for item in items)
    columns = {"input_ids": 0, "labels": -100}
    return {
        name: torch.stack(
            [
                torch.nn.functional.pad(item[name], (0, longest - len(item[name])), value=fill)
                for item in items
            ]
        )
        for name, fill in columns.items()
    }


def main(shape):
    big = shape == "7b"
    config = LlamaConfig(**SHAPES[shape], use_cache=False)
    with torch.device("cuda"):
        model = (
            LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
            if big
            else LlamaForCausalLM(config)
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4 if big else 12,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1 if big else 2,
            gradient_checkpointing=big,
            bf16=True,
            optim="adamw_torch",
            logging_steps=2,
            save_strategy="no" if big else "steps",
            save_steps=6,
            eval_strategy="no" if big else "steps",
            eval_steps=6,
            dataloader_num_workers=0 if big else 2,
            report_to="none",
            disable_tqdm=True,
        )
        data = {"train_dataset": Tokens(64, 1024 if big else 256), "eval_dataset": Tokens(8, 256)}
        trainer = Trainer(model, arguments, data_collator=padded, **data)
        trainer.train()
        if not big:
            trainer.save_model(folder + "/last")
            # Asks torch for what is reserved and allocated, to warm its allocator up.
            LlamaForCausalLM.from_pretrained(folder + "/last", device_map="cuda")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"steps": trainer.state.global_step, "parameters": parameters}))


if __name__ == "__main__":
    main(sys.argv[1])
