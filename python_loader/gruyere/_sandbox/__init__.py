"""Runs a program so that nothing outside of a folder of ours changes: the program sees its files as
they are and may write, and what it writes goes away with that folder.

    with Folder("dryrun") as folder:
        box = choose(folder, request["sandbox"])
        run = box.start(command, environment, output)

The kernel keeps the promise, in one of two ways; `choose` tries each on a file of its own before it
is taken.

- `overlay`: namespaces of user, mounts and network, with an overlay over each tree and loopback
  alone. The program's paths are its own.
- `landlock`, where a container forbids namespaces: reads everywhere, writes in the run's folder
  alone. There `links` mirrors the program's files, and `guard` replaces a link by a copy just
  before the program writes to it.

What is where:

- `kernel`: system calls that Python has no function for.
- `overlay`, `landlock`, `links`, `filter`, `guard`: the two ways.
- `enter`: the process between us and the program. It starts the program in its sandbox, watches
  it, and ends with it.
- `box`: what callers use.
"""

from .box import LOOKS as LOOKS
from .box import Allowed as Allowed
from .box import Box as Box
from .box import Folder as Folder
from .box import Run as Run
from .box import behind as behind
from .box import choose as choose
from .box import remedy as remedy
