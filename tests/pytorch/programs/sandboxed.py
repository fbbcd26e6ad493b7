"""Runs a command in the package's sandbox: sandboxed.py REQUEST COMMAND..., and says as JSON how it
went. Needs no torch."""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python_loader"))

from gruyere._errors import GruyereError  # noqa: E402
from gruyere._sandbox import Folder, choose  # noqa: E402

asked = {"allow_writes": [], "allow_network": False, "scratch": 1 << 30, **json.loads(sys.argv[1])}
with Folder("test") as folder, tempfile.TemporaryFile() as output:
    try:
        box = choose(folder, asked)
    except GruyereError as error:
        sys.exit(str(error))
    run = box.start(sys.argv[2:], dict(os.environ), output)
    code, reason = box.wait(run, 60)
    run.end()
    output.seek(0)
    answer = {
        "way": box.way, "code": code, "reason": reason, "refused": run.refusals(),
        "said": output.read().decode(errors="replace"), "folder": str(folder),
    }  # fmt: skip
    run.close()
print(json.dumps(answer))
