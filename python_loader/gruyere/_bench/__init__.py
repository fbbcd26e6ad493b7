"""`gruyere bench --torch`: runs the same PyTorch programs under torch's own allocators and under
Gruyère, with the real code of both.

The command `gruyere` declares the options, finds the interpreter, and runs
`python -m gruyere._bench bench REQUEST`, or `compare REQUEST` for its short form. The request is
the arguments as typed. The parts:

- `compare` (in that process, which does not import torch): reads the arguments; the order of the
  runs, the search for the smallest device, the report.
- `server` (one process per allocator): imports torch once and forks for each run of a built-in
  program, so each run starts without CUDA.
- `script` (one process per run): runs a user's script or module as python itself would.
- `measure` (in the process of the run): limits the device's memory and reads the figures.
"""
