"""Thousands of allocations of random sizes from several threads, handed from one to another."""

import queue
import random
import threading

import torch

import gpu

THREADS, OPERATIONS = 6, 2500

gpu.install()
torch.cuda.init()
handed = queue.SimpleQueue()
failures = []


def work(seed):
    try:
        chance = random.Random(seed)
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()
        kept = []
        with torch.cuda.stream(stream):
            for _ in range(OPERATIONS):
                size = int(2 ** chance.uniform(0, 24))
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                while len(kept) > 40:
                    tensor = kept.pop(chance.randrange(len(kept)))
                    if chance.random() < 0.2:
                        handed.put(tensor)
                    del tensor
                if chance.random() < 0.2 and not handed.empty():
                    try:
                        kept.append(handed.get_nowait())
                    except queue.Empty:
                        pass
    except BaseException as error:  # a thread's failure must reach the test
        failures.append(repr(error))


threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
gpu.check_books()
while not handed.empty():
    handed.get()
gpu.check_nothing_is_left()
gpu.report(mallocs=gpu.phantom.phantom_witness_mallocs())
