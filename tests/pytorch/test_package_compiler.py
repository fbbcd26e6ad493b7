"""The package's hooks under a compiler: torch.compile and torch.export trace what they trace
without Gruyère."""

from conftest import GRUYERE, ROOT

# In one process, as importing the compiler takes seconds. With Gruyère's library named, Gruyère is
# in use.
PROGRAM = """
import json, os, warnings
import torch
if os.environ.get("GRUYERE_LIBRARY"):
    import gruyere
    gruyere.enable()
from torch._dynamo.utils import counters
from torch.nn.utils.parametrizations import spectral_norm
on = {"device": "cuda"}
x = torch.ones(2, 4, **on)

class Buffered(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.register_buffer("b", torch.ones(2, 4, **on))
        self.inner, self.changed = torch.nn.Linear(4, 4, **on), forward
    def forward(self, x):
        return self.inner(x) + self.changed(self, x)

def running_mean(self, x):
    self.b = self.b * 0.9 + x
    return self.b
def cache(self, x):
    self.b = torch.cat([self.b, x])
    return self.b.sum()
def rotary(self, x):
    if x.shape[0] > 1:
        self.b = self.b * 2
    return x * self.b
def new_buffer(self, x):
    self.register_buffer("new", x * 2)
    return self.new
def new_parameter(self, x):
    self.inner.bias = self.inner.bias
    return x
act = torch.nn.ReLU()
def new_module(x):
    return torch.nn.Sequential(act, act)(x)

programs = {name: Buffered(globals()[name]) for name in (
    "running_mean", "cache", "rotary", "new_buffer", "new_parameter")}
programs |= {"new_module": new_module, "spectral_norm": spectral_norm(torch.nn.Linear(4, 4, **on))}
optimizer = torch.optim.AdamW(programs["cache"].inner.parameters(), lr=torch.tensor(1e-3))
programs["cache"].inner(x).sum().backward()

facts = {}
def tried(name, function):
    torch._dynamo.reset()
    counters.clear()
    try:
        function()
        facts[name] = [sum(counters["graph_break"].values()), counters["frames"]["total"]]
    except Exception as error:
        facts[name] = str(error)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for name, program in programs.items():
        for full in (True, False):
            compiled = torch.compile(program, backend="eager", fullgraph=full)
            tried(f"{name} {full}", lambda: [compiled(x) for _ in range(2)])
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    tried("step", lambda: [step() for _ in range(3)])
    mean = Buffered(running_mean)
    tried("export", lambda: torch.export.export(mean, (x,), strict=True))
facts["ours"] = [str(w.message) for w in warned if "gruyere" in f"{w.filename} {w.message}"]
print(json.dumps(facts))
"""


def test_a_compiler_traces_what_it_traces_without_gruyere(phantom):
    ours = phantom.run(
        "", code=PROGRAM, PYTHONPATH=ROOT / "python_loader", GRUYERE_LIBRARY=GRUYERE
    ).check()
    theirs = phantom.run("", code=PROGRAM).check()
    assert ours.report == theirs.report
    frames = ours.report.pop("step")
    assert frames[1] > 0 and ours.report.pop("ours") == []
    # Whole graphs, each of one frame.
    assert all(found[0] == 0 for found in ours.report.values()), ours.report
