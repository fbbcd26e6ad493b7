"""Cells in IPython, as its terminal and as Jupyter's kernel name their code: a cell that defines a
function, one that is run twice, and one whose loop runs out of memory. Prints that exception."""

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
cell("def batch(n):\n    x = torch.randn(n, 1024, device='cuda')\n    return x * 2")
for _ in range(2):
    cell("warm = batch(1024)")
ran = cell("for i in range(1000):\n    history.append(batch(2048))")
print(f"ENDS {ran.error_in_exec}")
