"""What a program reads of the stand-in GPU where no kernel has computed it, whichever allocator
has the memory and however the program is started."""

import json
import subprocess
import sys

import pytest

from conftest import COMMAND, GRUYERE, PHANTOM, ROOT, SHIM, clean_environment
from dry_runs import dryrun, told
from gruyere._dryrun import computed, valid


def of_package(folder, code):
    """Runs a program as users without a GPU do: `python -m gruyere --stand-in`."""
    (folder / "program.py").write_text(code)
    environment = clean_environment() | {
        "PYTHONPATH": str(ROOT / "python_loader"),
        "GRUYERE_LIBRARY": str(GRUYERE),
        "GRUYERE_PHANTOM": str(PHANTOM),
        **SHIM,
    }
    line = [sys.executable, "-m", "gruyere", "--stand-in", "program.py"]
    ran = subprocess.run(
        line, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# Blocks that had data of the host's, which results of kernels have then, and data again.
REUSED = """
import json, os, torch
START
old = {size: [torch.full((size,), 3.25).cuda() for _ in range(64)] for size in (8, 4096)}
kept = old[8][0].tolist()
places = {tensor.data_ptr() for tensors in old.values() for tensor in tensors}
first = old[8].pop(0)
old.clear()
tensors = tensor = None
sizes = [size for size in (8, 4096) for _ in range(32)]
new = [torch.empty(size // 2, dtype=torch.int64, device="cuda") + 1 for size in sizes]
reused = [tensor for tensor in new if tensor.data_ptr() in places]
assert reused
copied = [torch.arange(4).cuda() for _ in range(8)]
print(json.dumps({
    "found": sorted({number for tensor in reused for number in tensor.tolist()}),
    "copied": [tensor.tolist() for tensor in copied] == [[0, 1, 2, 3]] * 8,
    "kept": first.tolist() == kept == [3.25] * 8,
}))
"""
STARTS = {
    "torch": "",
    "expandable": 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
    "async": 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"',
    "native": "import gruyere; gruyere.enable(door='native')",
    "pluggable": "import gruyere; gruyere.enable(door='pluggable')",
}


@pytest.mark.parametrize("values", ["zeros", "random:1"])
@pytest.mark.parametrize("start", STARTS)
def test_what_was_copied_to_a_block_is_not_read_by_the_tensor_that_has_it_next(
    phantom, start, values
):
    begin, settings = STARTS[start], {"PHANTOM_VALUES": values, "PHANTOM_DRYRUN": 1}
    if "environ" in begin:
        # torch reads it when it is imported.
        name, value = begin.split('"')[1::2]
        settings |= {name: value, "PYTORCH_ALLOC_CONF": value}
        begin = ""
    settings |= {"PYTHONPATH": ROOT / "python_loader", "GRUYERE_LIBRARY": GRUYERE}
    ran = phantom.run(None, code=REUSED.replace("START", begin), **settings).check()
    invented = [0] if values == "zeros" else list(range(1, 8))
    assert ran.report == {"found": invented, "copied": True, "kept": True}


def test_a_program_on_the_stand_in_reads_zeros_where_data_of_the_hosts_was(tmp_path):
    found = of_package(tmp_path, REUSED.replace("START", ""))
    assert found == {"found": [0], "copied": True, "kept": True}


# Constructors under a device context, in each way in which torch has them.
CONSTRUCTED = """
import json, torch, torch.overrides
BEFORE
from torch.utils._device import _device_constructors

made = {
    "ones": lambda: torch.ones(3), "zeros": lambda: torch.zeros(3),
    "full": lambda: torch.full((3,), 1.0), "randint": lambda: torch.randint(4, (3,)),
    "randperm": lambda: torch.randperm(3), "tensor": lambda: torch.tensor([1]),
    "rand": lambda: torch.rand(3), "arange": lambda: torch.arange(3),
    "norm": lambda: torch.nn.BatchNorm1d(3).running_var,
}
with torch.device("cuda"):
    context = {name: make().device.type for name, make in made.items()}
torch.set_default_device("cuda")
default = {name: make().device.type for name, make in made.items()}
torch.set_default_device(None)

seen = []
class Tensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function.__name__ == "add":
            seen.append([
                torch.overrides.resolve_name(function),
                torch.overrides.is_tensor_method_or_property(function),
                function in torch.overrides.get_testing_overrides(),
            ])
        return super().__torch_function__(function, types, arguments, options or {})

tensor = torch.zeros(3).as_subclass(Tensor)
torch.add(tensor, 1), tensor.add(1)
print(json.dumps({"context": context, "default": default, "seen": seen}))
"""


@pytest.mark.parametrize("before", ["", 'torch.set_default_device("cuda")', "torch.device('cuda')"])
def test_a_device_context_and_overrides_know_torchs_functions_on_the_stand_in(tmp_path, before):
    found = of_package(tmp_path, CONSTRUCTED.replace("BEFORE", before))
    for way in ("context", "default"):
        assert set(found[way].values()) == {"cuda"}, found[way]
    assert found["seen"] == [["torch.add", False, True], ["torch.Tensor.add", True, True]]


# A policy of each kind: its parameters, samples and their probabilities.
POLICIES = """
import json, torch, torch.distributions as D

net = torch.nn.Linear(8, 6).cuda()
opt = torch.optim.SGD(net.parameters(), 0.1)
checked = {
    "categorical": lambda x, s, p: D.Categorical(logits=x),
    "probabilities": lambda x, s, p: D.Categorical(probs=x.softmax(-1)),
    "normal": lambda x, s, p: D.Normal(x, s), "bernoulli": lambda x, s, p: D.Bernoulli(p),
    "beta": lambda x, s, p: D.Beta(s, s), "dirichlet": lambda x, s, p: D.Dirichlet(s),
    "matrix": lambda x, s, p: D.MultivariateNormal(x, torch.diag_embed(s)),
    "factor": lambda x, s, p: D.MultivariateNormal(x, scale_tril=torch.diag_embed(s)),
    "independent": lambda x, s, p: D.Independent(D.Normal(x, s), 1),
    "transformed": lambda x, s, p: D.TransformedDistribution(
        D.Normal(x, s), [D.TanhTransform(cache_size=1)]
    ),
    "uniform": lambda x, s, p: D.Uniform(x, x + s), "geometric": lambda x, s, p: D.Geometric(p),
    "mixture": lambda x, s, p: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, s)),
}
for step in range(4):
    x = net(torch.rand(4, 8, device="cuda"))
    for make in checked.values():
        policy = make(x, x.exp(), x.sigmoid())
        sample = policy.sample()
        loss = -policy.log_prob(sample).mean()
    opt.zero_grad()
    x.sum().backward()
    opt.step()
print(json.dumps({"done": len(checked)}))
"""


def test_ordinary_parameters_and_samples_pass_the_checks_of_distributions(tmp_path):
    assert of_package(tmp_path, POLICIES)["done"]
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "program.py"))
    assert document["trust"]["reasons"] == []
    assert document["trust"]["answered"][valid.VALID] > 0


# What is known to be wrong: on the host, and copied from there.
WRONG = """
import json, torch, torch.distributions as D

wrong = {
    "host": lambda: D.Normal(torch.zeros(2), torch.tensor([-1.0, 1.0])),
    "sample": lambda: D.Bernoulli(torch.tensor([0.5])).log_prob(torch.tensor([2.0])),
    "bounds": lambda: D.Uniform(torch.ones(2), torch.zeros(2)),
    "copied": lambda: D.Normal(torch.zeros(2).cuda(), torch.tensor([-1.0, 1.0]).cuda()),
    "shape": lambda: D.Normal(torch.zeros(2).cuda(), 1.0).log_prob(torch.zeros(3).cuda()),
}
refused = []
for name, make in wrong.items():
    try:
        make()
    except ValueError:
        refused.append(name)
D.Normal(torch.zeros(2).cuda(), torch.ones(2).cuda() * 2)
after = (
    bool((torch.empty(2, device="cuda") + 1 > 0).all()), bool(torch._is_all_true(torch.ones(2) > 2))
)
x = torch.empty(2, device="cuda") * 2
equal = bool(torch._is_all_true(x == x))
print(json.dumps({"refused": refused, "after": after, "equal": equal}))
"""


def test_what_is_known_to_be_wrong_is_refused_and_other_conditions_are_as_they_were(tmp_path):
    found = of_package(tmp_path, WRONG)
    assert found["refused"] == ["host", "sample", "bounds", "copied", "shape"]
    assert found["after"] == [False, False] and found["equal"]


# Places that operators find on the device, and an environment on the host that checks them.
PLACES = """
import json, torch

net = torch.nn.Linear(8, 3).cuda()
opt = torch.optim.SGD(net.parameters(), 0.1)
seen = set()
def step(actions, high=3, low=0):
    for action in actions.cpu().flatten().tolist():
        seen.add(action)
        assert low <= action < high, f"action {action} is not from {low} to {high}"
for _ in range(4):
    # Data of the host's, whose memory the results may have.
    old = [torch.rand(size).cuda() for size in (8, 24, 64)]
    del old
    x = net(torch.rand(64, 8, device="cuda"))
    step(x.argmax(1)), step(torch.argmin(x, dim=-1)), step(x.max(1).indices), step(x.argmax(), 192)
    step(x.topk(2).indices), step(x.sort(dim=1)[1]), step(x.argsort(), 3)
    step(torch.multinomial(x.softmax(1), 1)), step(torch.randint(3, (64,), device="cuda"))
    step(torch.randint(4, 6, (64,), device="cuda", dtype=torch.int32), 6, 4)
    step(torch.randperm(5, device="cuda"), 5), step(x.median(0).indices[:2], 64)
    step(torch.distributions.Categorical(logits=x).sample())
    for action in x.argmax(1)[:4]:
        assert 0 <= action.item() < 3
    opt.zero_grad()
    x.sum().backward()
    opt.step()
print(json.dumps({"seen": sorted(seen)}))
"""


def test_an_environment_on_the_host_takes_the_actions_that_were_found_on_the_device(tmp_path):
    assert of_package(tmp_path, PLACES)["seen"] == [0, 4]
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "program.py"))
    assert document["trust"]["reasons"] == []
    # They are no more known than other values.
    assert computed.KNOWN not in document["trust"]["answered"]


# A decision by an action, which is another one with other values.
DECIDED = """
import torch

net = torch.nn.Linear(8, 3).cuda()
opt = torch.optim.SGD(net.parameters(), 0.1)
kept = []
for _ in range(4):
    x = net(torch.rand(64, 8, device="cuda"))
    if sum(x.argmax(1).tolist()):
        kept.append(torch.empty(1 << 20, device="cuda"))
    x.sum().backward()
    opt.step()
"""


def test_a_program_that_goes_on_by_the_actions_found_on_the_device_is_not_trusted(tmp_path):
    (tmp_path / "train.py").write_text(DECIDED)
    document = told(dryrun(tmp_path, "--alloc", "torch", "--json", "train.py"), 4)
    assert document["trust"]["difference"]["read"] == "train.py:9"


def test_the_rows_of_a_comparison_read_the_same_values(tmp_path):
    code = REUSED.replace("START", "").replace("print(", "open('found.json', 'a').write(")
    (tmp_path / "program.py").write_text(code)
    environment = clean_environment() | {
        "GRUYERE_LIBRARY": str(GRUYERE), "GRUYERE_PHANTOM": str(PHANTOM), **SHIM,
    }  # fmt: skip
    line = [COMMAND, "compare", "--stand-in", "--allow-writes=.", "--", sys.executable]
    ran = subprocess.run(
        [str(word) for word in line] + ["program.py"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = (tmp_path / "found.json").read_text().replace("}{", "}\n{").splitlines()
    wanted = {"found": [0], "copied": True, "kept": True}
    assert [json.loads(row) for row in rows] == [wanted] * 3
