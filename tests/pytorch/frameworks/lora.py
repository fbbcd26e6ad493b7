"""peft: LoRA on the attention of a LLaMA, trained, merged."""

import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=2000,
        use_cache=False,
    )
    base = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    model = get_peft_model(
        base,
        LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]),
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = 0
    for length in (64, 256, 128, 384):
        tokens = torch.randint(0, 2000, (2, length)).to("cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(input_ids=tokens).logits
    print(json.dumps({"steps": steps, "trainable": trainable, "logits": list(logits.shape)}))


if __name__ == "__main__":
    main()
