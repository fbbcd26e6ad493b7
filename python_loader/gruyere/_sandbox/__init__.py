"""A sandbox: runs a program so that nothing changes outside a temporary folder. The program sees
its files as they are and may write; what it writes is removed with that folder.

    with Folder("dryrun") as folder:
        box = choose(folder, request["sandbox"])
        run = box.start(command, environment, output)

The kernel enforces this, in one of two ways; `choose` tests a way on temporary files before it uses
it.

- `overlay`: user, mount and network namespaces, with an overlay over each tree and a network that
  has only loopback. The program's paths do not change.
- `landlock`, if a container forbids namespaces: the program can read everywhere and write only in
  the run's folder. `links` mirrors the program's files there, and `guard` replaces a link by a copy
  just before the program writes to it.

The modules:

- `kernel`: system calls that Python has no function for.
- `mounts`: the list of mounts.
- `overlay`; `landlock`, `links`, `filter`, `guard`, `addresses`, `shared`: the two ways.
- `folders`: opens and removes folders without following the program's links.
- `enter`: the process between us and the program. It starts the program in its sandbox, watches
  it, and ends with it.
- `owned`: folders of runs that were killed, which a later run removes.
- `signals`: the signals that end a command.
- `box`: the interface for callers.
"""

from .box import LOOKS as LOOKS
from .box import Allowed as Allowed
from .box import Box as Box
from .box import Folder as Folder
from .box import Run as Run
from .box import behind as behind
from .box import choose as choose
from .box import remedy as remedy
from .box import remedy_for_stdin as remedy_for_stdin
from .signals import exit_on_signals as exit_on_signals
