"""What programs of others' making run in."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import environment as tests  # noqa: E402

VENV = tests.ROOT / ".venv-dryrun-programs"
RELEASE = tests.TARGET / "release"


def surroundings():
    """What the stand-in's users have around them, without it."""
    return {name: value for name, value in os.environ.items() if name[:8] != "PHANTOM_"} | {
        "GRUYERE_LIBRARY": str(RELEASE / "libgruyere.so"),
        "XDG_CACHE_HOME": str(tests.TARGET / "shims"),
        "CUDA_HOME": str(tests.TARGET / "cuda-toolkit" / "nvidia" / "cu13"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }


def environment(reports):
    return surroundings() | {
        **tests.owned(),
        "LD_PRELOAD": str(RELEASE / "libphantom_cuda.so"),
        "LD_LIBRARY_PATH": str(tests.TARGET / "phantom-libs"),
        "PHANTOM_BOOKS": str(reports / "books-%p"),
        "PYTHONPATH": str(HERE.parent / "site"),
        "GRUYERE_TEST_REPORTS": str(reports),
        "GRUYERE_TEST_LIBRARY": str(RELEASE / "libgruyere.so"),
        "GRUYERE_TEST_PHANTOM": str(RELEASE / "libphantom_cuda.so"),
    }
