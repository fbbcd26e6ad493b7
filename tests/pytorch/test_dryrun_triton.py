"""What a program's own Triton kernels write is unknown to a dry run."""

from dry_runs import dryrun

COUNTS = """
import torch
import triton
import triton.language as tl


@triton.jit
def count(x, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum((tl.load(x + at, at < n, 0) > 0).to(tl.int32), 0))


x = torch.randn(1000, device="cuda")
total = torch.zeros(1, device="cuda", dtype=torch.int32)
for _ in range(3):
    count[(1,)](x, total, 1000, BLOCK=1024)
    if total.item() > 0:
        more = torch.empty(1 << 20, device="cuda")
"""


def test_what_a_programs_own_triton_kernel_writes_is_unknown(tmp_path):
    (tmp_path / "train.py").write_text(COUNTS)
    ran = dryrun(tmp_path, "--alloc", "torch", "train.py")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "after a value was read at train.py:17" in " ".join(ran.stdout.split())
