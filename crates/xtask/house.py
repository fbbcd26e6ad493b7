#!/usr/bin/env python3
"""The shape of the heap (crates/heap/src), and the width of lines everywhere.

A method of Heap, Device or Central stands in that type's own file or in one file for its feature;
the books below (BOOKS) know none of the three. Neither files nor folders form a cycle. A file has
one concept, so at most 600 lines, and a name that no other file of the heap has.
"""

import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HEAP = ROOT / "crates/heap/src"
LINES, COLUMNS, WORD = 600, 100, 80
BOOKS = {"small", "runs", "order", "driver"}
TESTS = "\n#[cfg(test)]\nmod tests {"


def expand(tree: str) -> list[str]:
    """The paths of a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    head, brace, rest = tree.partition("{")
    if not brace:
        return [tree.strip()]
    parts, depth, part = [], 0, ""
    for char in rest[: rest.rindex("}")]:
        depth += (char == "{") - (char == "}")
        part, done = ("", part) if char == "," and not depth else (part + char, "")
        parts += [done] if done else []
    return [head.strip() + path for part in [*parts, part] for path in expand(part)]


def module(path: Path) -> list[str]:
    return list((path.parent if path.stem == "mod" else path.with_suffix("")).parts)


def uses(text: str, inside: list[str]) -> set[str]:
    """The modules of the crate that a file names outside of its tests, as paths from the crate."""
    code = re.sub(r"(?m)^\s*//.*$", "", text.split(TESTS)[0])
    code = re.sub(r"(?m)^pub(\([a-z]+\))? use [^;]*;", "", code)
    trees = re.findall(r"\b(?:crate|super|self)::[\w:]*(?:\{[^;]*?\}(?=;))?", code)
    found = set()
    for path in (path for tree in trees for path in expand(tree)):
        parts, base = path.split("::"), inside
        while parts[0] in ("crate", "self", "super"):
            base = {"crate": [], "self": base, "super": base[:-1]}[parts.pop(0)]
        found.add("::".join([*base, *parts]))
    return found


def acyclic(graph: dict[str, set[str]], what: str) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"{what} form a cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def heap() -> list[str]:
    files = {path.relative_to(HEAP): path.read_text() for path in sorted(HEAP.rglob("*.rs"))}
    named = {"::".join(module(path)): path for path in files}
    wrong = [f"{p}: {t.count(chr(10))} lines" for p, t in files.items() if t.count("\n") > LINES]
    names = Counter(path.name for path in files if path.name != "mod.rs")
    wrong += [f"{name}: {count} files of that name" for name, count in names.items() if count > 1]
    graph: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path, text in files.items():
        if path.name == "lib.rs":
            continue
        owner = re.search(r"(?m)^impl (Heap|Device|Central) \{", text)
        if owner and path.parts[0] in BOOKS:
            wrong.append(f"{path}: an impl of {owner[1]} among the books")
        for used in uses(text, module(path)):
            while used and used not in named:
                used = used.rpartition("::")[0]
            if not used or named[used] == path:
                continue
            graph.setdefault(str(path), set()).add(str(named[used]))
            if len(path.parts) > 1 and len(named[used].parts) > 1:
                folders.setdefault(path.parts[0], set()).add(named[used].parts[0])
    for folder in folders:
        folders[folder].discard(folder)
    print(f"heap: {len(files)} files, {sum(t.count(chr(10)) for t in files.values())} lines")
    return wrong + acyclic(graph, "files") + acyclic(folders, "folders")


def columns() -> list[str]:
    """Wide lines, but for rows of tables, code blocks, marks, and words that no break mends."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split("\n")
    wrong = []
    for name in listed:
        path = ROOT / name
        if path.suffix not in {".rs", ".py", ".c", ".cpp", ".h", ".sh", ".toml", ".md"}:
            continue
        if "results" in path.parts or not path.is_file():
            continue
        fenced = False
        for number, line in enumerate(path.read_text().split("\n"), 1):
            page, text = path.suffix == ".md", re.sub(r"<!-- .*? -->", "", line)
            fenced ^= page and line.lstrip().startswith(("```", "~~~"))
            code = page and (fenced or line.startswith("    "))
            row = re.match(r"\s*(//[/!]? )?\|", line)
            mended = any(len(word) > WORD for word in line.split())
            if len(text) > COLUMNS and not (code or row or mended):
                wrong.append(f"{name}:{number}: {len(text)} columns")
    return wrong


if __name__ == "__main__":
    found = heap() + columns()
    print("\n".join(found))
    sys.exit(bool(found))
