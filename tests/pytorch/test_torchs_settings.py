"""torch's own settings, which people have set: each is honoured, or answered with what replaces it;
and programs that branch on them, or on the allocator's name, as docs/pytorch.md says."""

import pytest

from conftest import ROOT
from door import through

from gruyere._torch import alloc_conf


@pytest.fixture(autouse=True)
def neither(monkeypatch):
    for name in alloc_conf.VARIABLES:
        monkeypatch.delenv(name, raising=False)


# Every key of torch's, of all versions that are served (strings of libc10 and libc10_cuda).
TORCHS_KEYS = {
    "backend": "cudaMallocAsync",
    "expandable_segments": "True",
    "expandable_segments_reserve": "0.5",
    "expandable_segments_reserve_by_class": "[a:0.5]",
    "garbage_collection_threshold": "0.8",
    "graph_capture_record_stream_reuse": "True",
    "large_segment_size_mb": "64",
    "max_non_split_rounding_mb": "64",
    "max_split_size_mb": "64",
    "per_process_memory_fraction": "0.5",
    "pinned_free_catch_all": "True",
    "pinned_max_cached_size_mb": "64",
    "pinned_max_round_threshold_mb": "64",
    "pinned_num_register_threads": "2",
    "pinned_reserve_segment_size_mb": "64",
    "pinned_use_background_threads": "True",
    "pinned_use_cuda_host_register": "True",
    "release_lock_on_cudamalloc": "True",
    "roundup_power2_divisions": "4",
    "throw_on_cudamalloc_oom": "True",
}


def test_every_setting_of_torchs_is_answered_with_what_replaces_it(monkeypatch):
    for key, value in TORCHS_KEYS.items():
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"{key}:{value}")
        for counts in (True, False):
            said = alloc_conf.line(alloc_conf.limit() is not None, counts)
            assert said.startswith(f"PYTORCH_CUDA_ALLOC_CONF: {key}:{value}: "), said
            answers = ("honoured", "applies as before", "has no meaning here: it", "refuses")
            assert any(answer in said for answer in answers), said
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "no_such_key:1")
    assert "is not known to Gruyère" in alloc_conf.line(False, True)


def test_of_two_variables_the_one_is_taken_that_torch_takes(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.25,backend:native")
    assert alloc_conf.limit() == "25%"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    assert alloc_conf.limit() == "50%"
    said = alloc_conf.line(True, True)
    assert "per_process_memory_fraction:0.5: is honoured (limit:50%)" in said
    assert "per_process_memory_fraction:0.25: PYTORCH_CUDA_ALLOC_CONF takes precedence" in said
    assert "backend:native: has no meaning here" in said


# How programs of others ask (their own expressions, shortened), what each does then, and what they
# do under Gruyère. The names are those of the table in docs/pytorch.md.
PROGRAMS = {
    # vllm/device_allocator/cumem.py: around its MemPool it turns the setting off, and on again.
    "vLLM": (
        """
if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    block = tensor(3)
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
other = tensor(3)
assert block.data_ptr() and other.data_ptr()
""",
        "expandable_segments:True",
    ),
    # torch_memory_saver/entrypoint.py: refuses to work with the setting.
    "torch_memory_saver": (
        """
def checked():
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise RuntimeError("TorchMemorySaver is disabled")
refused(checked)
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ""
checked()
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    assert tensor(3).data_ptr()
""",
        "expandable_segments:True",
    ),
    # cuda_malloc.py puts the setting there before torch is imported; model_management.py prints it.
    "ComfyUI": (
        """
assert "{} : {}".format(torch.cuda.get_device_name(0), torch.cuda.get_allocator_backend()).endswith(
    " : gruyere"
)
assert "cudaMallocAsync" not in torch.cuda.get_allocator_backend()
assert tensor(3).data_ptr()
# torch reads its settings for it.
assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
""",
        "backend:cudaMallocAsync",
    ),
    # Those that want torch's own, and say so.
    "programs that continue only": (
        """
assert torch.cuda.get_allocator_backend() != "native"
block = tensor(3)
assert torch.cuda.memory_allocated() == 3 * MIB
""",
        "expandable_segments:True",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_branch_on_strings_do_as_the_table_says(phantom, name):
    code, conf = PROGRAMS[name]
    ran = through(phantom, code=code, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert ran.err.count(f"PYTORCH_CUDA_ALLOC_CONF: {conf}: has no meaning here") == 1, ran.err


def test_the_table_has_each_program_and_each_setting():
    page = (ROOT / "docs" / "pytorch.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name in [*PROGRAMS, "SGLang", "DeepSpeed"]:
        assert any(row.startswith(f"| {name}") for row in rows), name
    for key in TORCHS_KEYS:
        named = "pinned_*" if key.startswith("pinned_") else key
        assert any(f"`{named}`" in row for row in rows), key
