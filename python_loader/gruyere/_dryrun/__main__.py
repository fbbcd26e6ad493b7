"""python -m gruyere._dryrun: see the package. It calls functions in other modules only, because the
program replaces this module."""

import sys

if __name__ == "__main__":
    what, request = sys.argv[1:3]
    if what == "main":
        from gruyere._dryrun.main import main
    else:
        from gruyere._dryrun.worker import main
    main(request)
