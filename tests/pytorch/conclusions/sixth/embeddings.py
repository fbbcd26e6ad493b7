"""All embeddings of a dataset stay on the GPU.

cause: grows
also: collects
device: 4GiB
ends: oom
"""

import torch
import torch.nn as nn

enc = (
    nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True), 4)
    .cuda()
    .eval()
)
embs = []


@torch.inference_mode()
def encode(batch):
    h = enc(batch)  # the cause
    return h  # forgot the mean-pool over tokens


for i in range(500):
    b = torch.randn(64, 128, 768, device="cuda")
    embs.append(encode(b))  # the cause
all_emb = torch.cat(embs)
print(all_emb.shape)
