"""Where in the program memory comes from, as the commands show it: a live training on the real
torch, read from outside."""

from conftest import GRUYERE, HERE, ROOT

# A model, an optimizer, and a line that keeps 64 MiB of each step.
TRAINING = """
import json, os, pickle, subprocess
import torch
from torch.cuda import _memory_viz
import gruyere
torch.backends.cudnn.enabled = False
gruyere.enable(door="pluggable")
MIB = 1 << 20

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Linear(1024, 1024)
    def forward(self, x):
        return torch.relu(self.mlp(x))

kept = []
def leak():
    kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))  # leaks

model = torch.nn.Sequential(*[Block() for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    outputs = model(torch.empty(4096, 1024, device="cuda"))
    outputs.sum().backward()
    optimizer.step()
    leak()
    return outputs
for _ in range(8):
    outputs = step()

def outside(*arguments):
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LD_", "PHANTOM_", "GRUYERE_CONF"))
    }
    command = [os.environ["GRUYERE_TEST_COMMAND"], *arguments]
    return subprocess.run(command, env=clean, check=True, capture_output=True, text=True).stdout
pid = str(os.getpid())
own = open(__file__).read().splitlines()
leaks = next(n for n, line in enumerate(own, 1) if line.endswith("# leaks"))
leaking = f"train.py:{leaks} in leak"
"""


def run(phantom, code):
    script = phantom.folder / "train.py"
    script.write_text(TRAINING + code)
    launch = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    settings = {
        "PYTHONPATH": f"{HERE / 'programs'}:{ROOT / 'python_loader'}",
        "GRUYERE_LIBRARY": GRUYERE,
        "GRUYERE_CONF": "blame:large",
    }
    return phantom.run(None, code=launch, allocator="door", **settings).check()


def test_every_view_names_the_line_that_leaks_with_what_it_holds(phantom):
    run(
        phantom,
        """
held = torch.cuda.memory_allocated()
sites = json.loads(outside("map", pid, "--json"))["sites"]
named = {}
for site in sites:
    named[site["name"]] = named.get(site["name"], 0) + site["live_bytes"]
assert named[leaking] == 8 * 64 * MIB, named
assert sum(named.values()) == held, (sum(named.values()), held)
# The last step's outputs.
assert "Sequential[3]" in {site["module"] for site in sites}, sites
page = outside("map", pid, "--by", "site", "--width", "120")
assert f"512.00 MiB" in next(line for line in page.splitlines() if leaking in line), page
lines = json.loads(outside("top", pid, "--json"))["processes"][0]["devices"][0]["lines"]
leak = next(line for line in lines if line["name"] == leaking)
assert leak["live_bytes"] == 512 * MIB and leak["growth"]["bytes_a_step"] == 64 * MIB, leak
grow = [line["name"] for line in lines if line["growth"]]
assert grow == [leaking], grow
metrics = outside("export", "--print")
mine = [line for line in metrics.splitlines() if line.startswith("gruyere_site_live_bytes")]
assert any(leaking in line and f'pid="{pid}"' in line for line in mine) and len(mine) <= 10, mine
told = outside("address", pid, hex(kept[3].data_ptr() + 5))
assert f"from    {leaking}" in told and "in step" in told and "<module>" not in told, told
stat = outside("stat", pid)
assert "forward " in stat and "not known" in stat, stat
""",
    )


def test_a_snapshot_from_outside_has_the_programs_frames_and_torchs_viewers_show_them(phantom):
    run(
        phantom,
        """
outside("snapshot", pid, "-o", "now.pickle")
with open("now.pickle", "rb") as file:
    snapshot = pickle.load(file)
blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
frames = {block["address"]: block["frames"] for block in blocks}
stack = frames[kept[3].data_ptr()]
assert stack[0]["filename"] == "gruyere" and stack[0]["name"] == "lifetime auto, step 4", stack
told = [(os.path.basename(frame["filename"]), frame["name"]) for frame in stack[1:]]
assert told[:3] == [("train.py", "leak"), ("train.py", "step"), ("train.py", "<module>")], told
assert stack[1]["line"] == leaks
assert frames[kept[4].data_ptr()][1] is stack[1], "a frame is in the file once"
noted = frames[outputs.data_ptr()][0]["name"]
assert noted == "forward, module Sequential[3], step 7", noted
# What torch's own viewers make of it: a flamegraph's lines are the stacks.
drawn = _memory_viz.memory(snapshot, lambda lines: lines)
assert f"train.py:{leaks}:leak" in drawn, drawn[:2000]
""",
    )
