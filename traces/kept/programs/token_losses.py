"""Data selection: the loss of every token under two language models, kept as float32 and as the
difference; the logits go at once."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WORDS = 50_257


def model(width, layers):
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, batch_first=True, norm_first=True
    )
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.ModuleList([nn.Embedding(WORDS, width), body, nn.Linear(width, WORDS)]).cuda().eval()


small, large = model(256, 4), model(512, 6)


def losses(model, tokens):
    embed, body, head = model
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device="cuda")
    y = head(body(embed(tokens), mask, is_causal=True))
    return F.cross_entropy(y.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


kept = []
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    for _ in recorder.steps(50):
        tokens = recorder.blank(8, recorder.draw.randrange(200, 512), high=WORDS)
        a, b = losses(small, tokens), losses(large, tokens)
        kept.append((tokens, a, b, a - b, (a - b).sort(-1)[0].cumsum(-1)))
        recorder.step()
