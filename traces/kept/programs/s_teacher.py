"""A teacher runs ahead on its own stream and keeps its logits of a whole chunk of batches; the
student learns from them afterwards."""

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WORDS = 12_007


def model(width, layers):
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, activation="gelu", batch_first=True, dropout=0
    )
    return nn.Sequential(
        nn.Embedding(WORDS, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, WORDS),
    ).cuda()


teacher, student = model(896, 8).bfloat16().requires_grad_(False), model(256, 3)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4)
ahead, main = torch.cuda.Stream(), torch.cuda.current_stream()
ahead.wait_stream(main)


def think():
    with torch.cuda.stream(ahead), torch.no_grad():
        return [
            (x := recorder.blank(10, recorder.draw.randrange(60, 190), high=WORDS), teacher(x))
            for _ in range(12)
        ]


chunk = think()
for _ in range(4):
    main.wait_stream(ahead)
    following = think()
    for x, goal in chunk:
        x.record_stream(main)
        goal.record_stream(main)
        with torch.autocast("cuda", torch.bfloat16):
            y = student(x)
        loss = F.kl_div(y.float().log_softmax(-1), goal.float().softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step()
    chunk = following
