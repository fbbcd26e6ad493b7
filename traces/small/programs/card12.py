"""A card of 12 GB near its end: a decoder of 3 billion parameters (the shapes of Llama 3.2 3B) in
bf16, its LoRA weights trained with checkpoints on texts of varied lengths."""

import recorder
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
model = model.to_empty(device="cuda")
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
for _ in recorder.steps(3):
    tokens = recorder.blank(1, recorder.draw.randrange(1200, 2700))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step()
