"""The package's hooks where a program is unusual: its tensors, its warnings, its settings."""

import subprocess
import sys
import threading

import pytest

from conftest import GRUYERE, HERE, ROOT, launched_environment
from gruyere import _control
from gruyere._torch import history, profiler

PACKAGE = ROOT / "python_loader"


def run(phantom, code, **settings):
    path = f"{PACKAGE}:{HERE / 'programs'}"
    return phantom.run("", code=code, PYTHONPATH=path, GRUYERE_LIBRARY=GRUYERE, **settings)


# Under warnings as errors.
UNUSUAL = """
import warnings, torch, gpu, gruyere
gruyere.enable()
warnings.simplefilter("error")

class Strict(torch.Tensor):
    # As in torch's documentation: functions that nobody has registered are refused.
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented

class Unfinished(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
    def __init__(self, inner):
        self.inner = inner
    def __tensor_flatten__(self):
        raise AssertionError("not finished yet")
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))

class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))

def persistent():
    return gpu.from_outside()["devices"][0]["lifetimes"]["persistent"]["live_bytes"] >> 20

def mib(count):
    return torch.zeros(count << 20, dtype=torch.uint8, device="cuda")

module, seen = torch.nn.Module(), []
plain, strict = mib(2), mib(4)
with torch._C.DisableTorchFunctionSubclass():
    strict = strict.as_subclass(Strict)
module.register_buffer("strict", strict)
module.register_buffer("unfinished", Unfinished(mib(2)))
assert persistent() == 4, persistent()
with Mode():
    module.register_buffer("plain", plain)
assert seen == [] and persistent() == 6
module.register_buffer("view", mib(8)[1000:])
assert persistent() == 14, "a view's memory is all of it"
with torch._subclasses.fake_tensor.FakeTensorMode():
    torch.nn.Linear(4, 4, device="cuda")
module.register_buffer("sparse", torch.eye(4, device="cuda").to_sparse())
clone = torch._lazy_clone(plain)
module.register_buffer("clone", clone)
assert torch._C._is_cow_tensor(clone), "and so it is one still"
assert persistent() == 14
"""


def test_a_program_with_unusual_tensors_notices_nothing_of_their_being_counted(phantom):
    run(phantom, UNUSUAL).check()


@pytest.mark.parametrize("door", ["native", "pluggable"])
def test_a_warning_made_an_error_is_raised_when_all_is_in_place(phantom, door):
    hook = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    run(phantom, f"""
import warnings
import gruyere
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        gruyere.enable(door={door!r})
    except gruyere.GruyereWarning:
        pass
    else:
        raise AssertionError("no warning")
assert gruyere.is_enabled(), gruyere.disable_reason()
gruyere.enable()
import os, torch
assert os.environ["GRUYERE_ENABLE"] == "1" and gruyere._enable.door()[0] == {door!r}
layer = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 1024, device="cuda")).sum().backward()
optimizer.step()
import gpu
outside = gpu.from_outside()["devices"][0]
assert outside["gauges"]["step"] == 1 and outside["lifetimes"]["persistent"]["live_bytes"] > 4 << 20
assert torch.cuda.memory_allocated() == outside["live_bytes"]
""", **hook).check()


def test_what_the_package_replaces_can_be_pickled(phantom):
    ran = run(phantom, """
import pickle, torch, gruyere
gruyere.enable()
for function in (torch.save, torch.serialization.save, torch.cuda.Event, torch.nn.Module.to):
    assert pickle.loads(pickle.dumps(function)) is function
assert torch.save is torch.serialization.save
""")
    assert ran.code == 0, ran.err


def test_settings_that_are_not_utf_8_are_an_error_with_the_variables_name(tmp_path):
    environment = launched_environment(tmp_path, GRUYERE_CONF=b"dump_dir:/tmp/\xff")
    code = """
import gruyere
try:
    gruyere.enable()
except gruyere.GruyereError as error:
    print(ascii(str(error)))
"""
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"GRUYERE_CONF: not valid UTF-8: " in ran.stdout, ran.stderr


def test_a_program_without_stderr_gets_nothing_of_an_uncaught_error_on_its_stdout(tmp_path):
    code = """
import sys, torch
def full():
    return torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
sys.stderr = None
full()
"""
    (tmp_path / "program.py").write_text(code)
    environment = launched_environment(tmp_path / "records", PHANTOM_MEMORY="1GiB")
    (tmp_path / "records").mkdir()
    line = [sys.executable, "-m", "gruyere", "program.py"]
    ran = subprocess.run(line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert list((tmp_path / "records").glob("*.record"))


def test_the_stacks_of_a_history_go_with_it_and_no_number_is_given_twice():
    stacks = history._Stacks()
    here = sys._getframe()
    first, again = [stacks.number(here) for _ in range(2)]
    assert first == again == 1
    assert stacks.frames(first)[0]["name"] == here.f_code.co_name and stacks.frames(0) == []
    stacks.forget()
    assert (stacks._numbers, stacks._frames) == ({}, {})
    second = stacks.number(here)
    assert stacks.frames(first) == [] and stacks.frames(second) and second != first


def test_an_ended_history_keeps_no_stacks(phantom):
    run(phantom, """
import torch, gruyere
from gruyere._torch import history
gruyere.enable(door="pluggable")
record = torch.cuda.memory._record_memory_history
for end in (lambda: record(clear_history=True), lambda: record(None)):
    record()
    kept = torch.ones(1000, device="cuda")
    assert history._stacks._frames
    assert any(trace["frames"] for trace in torch.cuda.memory._snapshot()["device_traces"][0])
    end()
    assert not history._stacks._frames and not history._stacks._numbers
""").check()


def test_a_profiler_that_is_dropped_without_its_end_does_not_count_as_running(monkeypatch):
    class Library:
        told = []

        def gruyere_tell_profiler(self, runs):
            self.told.append(runs.value)

    class Profile:
        pass

    monkeypatch.setattr(profiler.library, "load", Library)
    profiler._tell(Profile(), True)
    other = Profile()
    profiler._tell(other, True)
    profiler._tell(other, False)
    assert Library.told == [1, 1, 0]


def test_a_listener_that_hears_of_an_alert_at_once_may_add_another(monkeypatch):
    def deliver(_):
        monkeypatch.setattr(_control, "_deliver", lambda _: False)
        _control.on_alert(print)
        return False

    monkeypatch.setattr(_control, "_deliver", deliver)
    monkeypatch.setattr(_control, "_thread", None)
    monkeypatch.setattr(_control, "_listeners", [])
    adding = threading.Thread(target=_control.on_alert, args=(repr,), daemon=True)
    adding.start()
    adding.join(60)
    assert not adding.is_alive() and set(_control._listeners) == {print, repr}


def test_the_start_up_hook_costs_a_python_without_torch_next_to_nothing():
    slow = "importlib.abc", "typing", "ctypes", "subprocess"
    code = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import gruyere._startup"
    code += f"; print([name for name in {slow} if name in sys.modules])"
    # Without `site`, which may import anything.
    ran = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr
