"""A thread a stream: four workers of a server, each with a stream of its own, share one model; what
they find is handed to a fifth on the default stream, which ranks it (record_stream). The workers
take turns, so that each recording is the same."""

import queue
import threading

import recorder
import torch
from torch import nn
from torch.nn import functional as F

WORKERS, ROUNDS = 4, 10

model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    *[
        layer
        for inside, outside in ((64, 128), (128, 256), (256, 512))
        for layer in (nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU())
    ],
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(8192, 1024),
).cuda()
model.eval()
turns = [threading.Semaphore(0) for _ in range(WORKERS)]
found, done = queue.Queue(), threading.Semaphore(0)


def work(turn, draw):
    stream = torch.cuda.Stream()
    for _ in recorder.steps(ROUNDS):
        turn.acquire()
        with torch.inference_mode(), torch.cuda.stream(stream):
            side = draw.choice((192, 224, 256, 320))
            batch = torch.zeros(draw.randint(1, 24), 3, side, side).pin_memory()
            vectors = F.normalize(model(batch.cuda(non_blocking=True)), dim=-1)
            ready = torch.cuda.Event()
            ready.record(stream)
        found.put((vectors, ready))
        del vectors, batch
        done.release()
    turn.acquire()
    stream.synchronize()
    done.release()


threads = [
    threading.Thread(target=work, args=(turn, recorder.random.Random(number)))
    for number, turn in enumerate(turns)
]
for thread in threads:
    thread.start()
index = torch.zeros(60_000, 1024, device="cuda")
waiting = []
for _ in recorder.steps(ROUNDS):
    order = list(turns)
    recorder.draw.shuffle(order)
    for turn in order:
        turn.release()
        done.acquire()
    while not found.empty():
        vectors, ready = found.get()
        torch.cuda.current_stream().wait_event(ready)
        vectors.record_stream(torch.cuda.current_stream())
        waiting.append((vectors @ index.t()).topk(10)[1])
        del vectors
    if len(waiting) > 8:
        torch.cat(waiting).cpu()
        waiting.clear()
    recorder.step()
for turn in turns:
    turn.release()
    done.acquire()
for thread in threads:
    thread.join()
