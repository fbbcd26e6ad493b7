"""Cells in IPython, as its terminal and as Jupyter's kernel name their code. `leak`: a cell that
defines a function, one that is run twice, and one whose loop runs out of memory. `retry`: a
training that runs out of memory, and a smaller one, which would fit. `nested`: `%%capture` and
`run_cell` in cells, and code that a frontend runs unseen. Prints the last exception, and what is
live when the advice for the second was followed."""

import sys

from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell


class OfJupyter(CachingCompiler):
    """As ipykernel's: the file's name is a hash of the cell's text, and a cell that is run again
    has the same."""

    def get_code_name(self, raw_code, code, number):
        return f"/tmp/ipykernel_4242/{abs(hash(raw_code))}.py"


KINDS = {"terminal": CachingCompiler, "jupyter": OfJupyter}
shell = InteractiveShell.instance()
shell.compile = KINDS[sys.argv[1]]()


def cell(source):
    return shell.run_cell(source, store_history=True)


cell("import torch, gruyere\ngruyere.enable()\nhistory = []")
if sys.argv[2] == "leak":
    cell("def batch(n):\n    x = torch.randn(n, 1024, device='cuda')\n    return x * 2")
    for _ in range(2):
        cell("warm = batch(1024)")
    ran = cell("for i in range(1000):\n    history.append(batch(2048))")
elif sys.argv[2] == "nested":
    cell("%%capture\nfor _ in range(3): history.append(torch.zeros(1 << 26, device='cuda'))")
    shell.run_cell("history.append(torch.zeros(1 << 24, device='cuda'))", silent=True)
    cell("# Shares its number with none.")
    inner = "history.append(torch.zeros(1 << 23, device='cuda'))"
    ran = cell(f"get_ipython().run_cell({inner!r})\nhistory.append(torch.zeros(1 << 29).cuda())")
else:
    cell("model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()")
    cell("def train(n):\n    return model(torch.randn(n, 1024, device='cuda')).sum().backward()")
    assert cell("train(40000)").error_in_exec
    ran = cell("train(20000)")
print(f"ENDS {ran.error_in_exec}")
del ran
cell("1/0")
cell("import gc; gc.collect(); print('LIVE', torch.cuda.memory_allocated())")
