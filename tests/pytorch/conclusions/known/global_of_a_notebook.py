"""Like Jupyter's Out: each cell's result stays in a global dict.

cause: grows
also: collects, cache
device: 3 GiB
ends: oom
"""

import torch

Out = {}
In = ["torch.rand(2048, 2048, device='cuda')", "Out[{last}] @ Out[{last}]"]
for number in range(400):
    source = In[0] if number % 2 == 0 else In[1].format(last=number - 1)
    Out[number] = eval(compile(source, f"<ipython-input-{number}>", "eval"))  # the cause
