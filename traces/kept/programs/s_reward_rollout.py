"""Texts are written on one stream and judged by a reward model on another; texts, log-probabilities
and rewards of the whole round are kept for the update."""

import recorder
import torch
from torch import nn

judge_stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
WIDTH, WORDS = 512, 20_000
embed, cell, head = (
    nn.Embedding(WORDS, WIDTH).cuda(),
    nn.LSTMCell(WIDTH, WIDTH).cuda(),
    nn.Linear(WIDTH, WORDS).cuda(),
)
layer = nn.TransformerEncoderLayer(WIDTH, 8, 2048, batch_first=True, dropout=0)
judge = nn.Sequential(
    nn.Embedding(WORDS, WIDTH),
    nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
    nn.Linear(WIDTH, 1),
).cuda()
judge_stream.wait_stream(main)
rounds = []
with torch.no_grad():
    for _ in recorder.steps(32):
        count = recorder.draw.randrange(40, 130)
        token, state = torch.zeros(count, dtype=torch.long, device="cuda"), None
        words, logs, hidden = [], [], []
        for _ in range(recorder.draw.randrange(24, 64)):
            state = cell(embed(token), state)
            log = head(state[0]).log_softmax(-1)
            token = (log + torch.rand_like(log)).argmax(-1).clamp(0, 0)
            words.append(token)
            logs.append(log.gather(1, token[:, None]))
            hidden.append(state[0])
        text = torch.stack(words, 1)
        judge_stream.wait_stream(main)
        with torch.cuda.stream(judge_stream):
            text.record_stream(judge_stream)
            rewards = judge(text)[..., 0]
        rounds.append((text, torch.cat(logs, 1), torch.stack(hidden, 1), rewards))
        recorder.step()
    main.wait_stream(judge_stream)
    torch.cat([r[3].mean(1) for r in rounds]).mean().item()
