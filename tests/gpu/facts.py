"""What machine this is, and whether kernels compute on it."""

from __future__ import annotations

from typing import Any, Dict

import machine


def main(allocator: str) -> Dict[str, Any]:
    machine.install(allocator)
    return machine.facts()


if __name__ == "__main__":
    machine.part(main)
