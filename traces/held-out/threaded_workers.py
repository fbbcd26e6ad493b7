"""Three worker threads, each with a stream, answer requests to one shared model from a queue."""

import queue
import random
import threading

import recorder
import torch
import torch.nn.functional as F
from torch import nn

rng = random.Random(12)
DIM = 768
layer = nn.TransformerEncoderLayer(
    DIM, 12, 3072, activation="gelu", batch_first=True, norm_first=True
)
with torch.device("cuda"):
    embed = nn.Embedding(50000, DIM).half()
    place = nn.Embedding(1024, DIM).half()
body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).half().cuda().eval()
heads = {
    "topic": nn.Linear(DIM, 200).half().cuda(),
    "toxic": nn.Linear(DIM, 2).half().cuda(),
    "vector": nn.Linear(DIM, 512).half().cuda(),
}
requests, answers = queue.Queue(), queue.Queue()


def work():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        while True:
            request = requests.get()
            if request is None:
                return
            number, kind, lengths = request
            tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long).pin_memory()
            tokens = tokens.cuda(non_blocking=True)
            padding = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
            x = embed(tokens) + place.weight[: tokens.shape[1]]
            x = body(x, src_key_padding_mask=padding.cuda(non_blocking=True))
            y = heads[kind](x[:, 0])
            y = F.normalize(y.float(), dim=-1) if kind == "vector" else y.float().softmax(-1)
            host = torch.empty(y.shape, dtype=y.dtype, pin_memory=True)
            host.copy_(y, non_blocking=True)
            stream.synchronize()
            answers.put((number, host))


threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads:
    t.start()
number = 0
for step in recorder.steps(15):
    burst = rng.randrange(2, 9)
    for _ in range(burst):
        lengths = [
            min(1024, max(8, int(rng.lognormvariate(4.6, 0.8))))
            for _ in range(rng.choice((1, 4, 8, 16)))
        ]
        requests.put((number, rng.choice(list(heads)), lengths))
        number += 1
    for _ in range(burst):
        answers.get()
    recorder.step()
for _ in threads:
    requests.put(None)
for t in threads:
    t.join()
