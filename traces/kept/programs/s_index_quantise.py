"""An index for search: a text encoder makes vectors on the main stream, a side stream assigns and
quantises them to codes; codes and residues are kept, vectors go."""

import recorder
import torch
from torch import nn

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
layer = nn.TransformerEncoderLayer(384, 6, 1536, activation="gelu", batch_first=True)
body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().half().cuda()
words = nn.Embedding(30_522, 384).half().cuda()
lists, books = (
    torch.zeros(4096, 384, device="cuda").half(),
    torch.zeros(48, 256, 8, device="cuda").half(),
)
side.wait_stream(main)
index = []
with torch.inference_mode():
    for _ in recorder.steps(70):
        x = body(words(recorder.blank(64, recorder.draw.randrange(40, 256), high=30_522)))
        tokens = nn.functional.normalize(x.flatten(0, 1), dim=1)
        side.wait_stream(main)
        tokens.record_stream(side)
        with torch.cuda.stream(side):
            nearest = (tokens @ lists.t()).argmax(1).clamp(0, 0)
            residue = tokens - lists[nearest]
            parts = residue.view(-1, 48, 8).transpose(0, 1)
            codes = torch.cdist(parts.float(), books.float()).argmin(-1).byte().t().contiguous()
            index.append((nearest.int(), codes, residue.norm(dim=1)))
        del x, tokens
        recorder.step()
