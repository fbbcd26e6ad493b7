#!/usr/bin/env python3
"""The table of docs/gpus.md, made from the package's gpus.json. `--check` only compares."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "python_loader/gruyere/_dryrun/gpus.json"
PAGE = ROOT / "docs/gpus.md"


def fresh(page: str) -> str:
    """The page with the table of the data, which begins at the first row."""
    table = "".join(
        f"| `{gpu['id']}` | {gpu['memory_mib']} | {gpu['printed']} | "
        f"[{gpu['source_name']}]({gpu['source']}) | {gpu['multiprocessors']} | "
        f"{gpu['capability']} |\n"
        for gpu in json.loads(DATA.read_text("utf-8"))
    )
    begin = page.index("| `")
    return page[:begin] + table + page[page.index("\n\n", begin) + 1 :]


def main() -> None:
    page = PAGE.read_text("utf-8")
    wanted = fresh(page)
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(wanted, "utf-8")
    elif page != wanted:
        sys.exit("docs/gpus.md is stale: run `cargo xtask docs`")


if __name__ == "__main__":
    main()
