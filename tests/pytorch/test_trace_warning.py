"""`GRUYERE_CONF=trace:FILE python train.py`, without anything that loads the library: it is said
that there will be no trace."""

import subprocess
import sys

import pytest
from conftest import GRUYERE, ROOT, clean_environment

LOADER = ROOT / "python_loader"
# As an interpreter does with the line that the wheel installs.
STARTUP = f"exec(open({str(LOADER / 'gruyere_startup.pth')!r}).read())\n"

# Of torch only what matters here: what is called when CUDA is first used.
TORCH = """
class cuda:
    waiting = []
    @staticmethod
    def _lazy_call(callable):
        cuda.waiting.append(callable)
    @staticmethod
    def init():
        for callable in cuda.waiting:
            callable()
"""


def run(tmp_path, code, **settings):
    (tmp_path / "torch.py").write_text(TORCH)
    environment = clean_environment() | {"PYTHONPATH": f"{LOADER}:{tmp_path}"} | settings
    ran = subprocess.run(
        [sys.executable, "-c", STARTUP + code], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


USES_CUDA = "import torch; torch.cuda.init(); torch.cuda.init()"


def test_a_trace_that_nobody_will_write_is_told_of_once_with_what_would(tmp_path):
    said = run(tmp_path, USES_CUDA, GRUYERE_CONF="share:off,trace:run-%p.trace.zst")
    assert said.count("GruyereWarning") == 1, said
    for part in (
        "trace (run-%p.trace.zst)",
        "python -m gruyere",
        "GRUYERE_ENABLE=1",
        "gruyere run --observe",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("code", "conf"),
    [
        ("import torch", "trace:file"),
        ("print('a child tool')", "trace:file"),
        (USES_CUDA, "share:off"),
        (USES_CUDA, "trace:file,trace:none"),
        (USES_CUDA, ""),
    ],
)
def test_who_uses_no_cuda_or_asks_for_no_trace_hears_nothing(tmp_path, code, conf):
    assert run(tmp_path, code, GRUYERE_CONF=conf) == ""


def test_where_the_library_is_loaded_by_whatever_way_nothing_is_said(tmp_path):
    loads = f"import ctypes; ctypes.CDLL({str(GRUYERE)!r})\n"
    assert run(tmp_path, loads + USES_CUDA, GRUYERE_CONF=f"trace:{tmp_path}/file") == ""


def test_a_plain_interpreter_imports_nothing_of_ours(tmp_path):
    assert (
        run(
            tmp_path,
            "import sys; assert not [name for name in sys.modules if name.startswith('gruyere')]",
        )
        == ""
    )


def test_real_torch_tells_when_cuda_is_first_used(phantom, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(LOADER)!r})\n{STARTUP}import torch; "
        "torch.ones(3, device='cuda')"
    )
    ran = phantom.run("", code=code, GRUYERE_CONF=f"trace:{tmp_path}/file")
    assert ran.code == 0 and ran.err.count("asks for a trace") == 1, ran.err
