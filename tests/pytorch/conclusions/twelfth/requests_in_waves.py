"""Results are kept for a second; the load comes and goes. It is killed on its way up again.

cause: nothing
device: 1 GiB
ends: killed
"""

import collections
import math
import os
import signal
import time

import gruyere
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda().eval()
kept, began = collections.deque(), time.time()
with torch.inference_mode():
    while (now := time.time()) - began < 19:
        kept.append((now, model(torch.zeros(256, 1024, device="cuda"))))
        while now - kept[0][0] > 1:
            kept.popleft()
        gruyere.step()
        time.sleep(0.004 + 0.05 * (1 + math.cos(2 * math.pi * (now - began) / 6)))
os.kill(os.getpid(), signal.SIGKILL)
