"""`gruyere bench --torch`: the same PyTorch programs under torch's own allocators and under
Gruyère, each side's real code.

The command `gruyere` reads the arguments, finds the interpreter, and runs
`python -m gruyere._bench REQUEST`. What runs where:

- `compare` (that process, which imports no torch): which run comes when, the search for the
  smallest device, the report.
- `server` (a process an allocator): imports torch once, and forks for every run of a built-in
  program, so each begins with no CUDA.
- `script` (a process a run): a script or module of the user's, as python itself would run it.
- `measure` (in the process of the run): puts the allocator in place, caps the device, reads the
  numbers.
"""
