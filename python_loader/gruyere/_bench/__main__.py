"""python -m gruyere._bench: see the package. It calls functions in other modules only, because a
user's script replaces this module."""

import sys

if __name__ == "__main__":
    what, request = sys.argv[1:3]
    if what == "bench":
        from gruyere._bench.compare import bench as main
    elif what == "compare":
        from gruyere._bench.compare import compare as main
    elif what == "server":
        from gruyere._bench.server import main
    else:
        from gruyere._bench.script import main
    main(request)
