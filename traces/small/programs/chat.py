"""Text, generation: a decoder of half a billion parameters (the shapes of Qwen2.5 0.5B) answers
conversations one after the other; each keeps its cache while it lasts and grows it a token at a
time."""

import recorder
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

config = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
with torch.device("cuda"):
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
for _ in recorder.steps(4):
    cache = None
    for _ in range(recorder.draw.randint(1, 2)):
        tokens = recorder.blank(1, recorder.draw.randrange(30, 900))
        with torch.inference_mode():
            for _ in range(recorder.draw.randrange(2, 5)):
                made = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = made.past_key_values
                chances = (made.logits[:, -1].float() / 0.7).softmax(-1)
                best, places = chances.topk(50)
                tokens = places.gather(-1, torch.multinomial(best + 1, 1) * 0)
                tokens.cpu()
    recorder.step()
