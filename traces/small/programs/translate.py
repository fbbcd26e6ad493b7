"""Text, generation: T5 base translates batches of sentences with four beams; the caches of the
beams are put into the order of the best at every token."""

import recorder
import torch
from transformers import T5Config, T5ForConditionalGeneration

BEAMS = 4
config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
with torch.device("cuda"):
    model = T5ForConditionalGeneration(config).half().eval()
for _ in recorder.steps(3):
    count, length = recorder.draw.randint(1, 12), recorder.draw.randrange(10, 120)
    with torch.inference_mode():
        sentences = recorder.blank(count, length)
        encoded = model.encoder(input_ids=sentences)
        encoded.last_hidden_state = encoded.last_hidden_state.repeat_interleave(BEAMS, 0)
        tokens = torch.zeros(count * BEAMS, 1, dtype=torch.long, device="cuda")
        scores, cache = torch.zeros(count, BEAMS, device="cuda"), None
        for _ in range(min(length, 7)):
            made = model(
                encoder_outputs=encoded,
                decoder_input_ids=tokens[:, -1:],
                past_key_values=cache,
                use_cache=True,
            )
            chances = made.logits[:, -1].float().log_softmax(-1).view(count, BEAMS, -1)
            total = (scores[:, :, None] + chances).flatten(1)
            scores, best = total.topk(BEAMS)
            first = torch.arange(count, device="cuda")[:, None] * BEAMS
            order = best // chances.shape[-1] + first
            cache = made.past_key_values
            cache.reorder_cache(order.flatten())
            tokens = torch.cat(
                [tokens.index_select(0, order.flatten()), (best % 100).view(-1, 1)], 1
            )
        tokens.cpu()
    del first, order, sentences, encoded, tokens, scores, cache, made, chances, total, best
    recorder.step()
