"""`gruyere dryrun`: will a program fit on a GPU, and where does its memory go, without one.

The command `gruyere` reads the arguments, finds the interpreter, and runs
`python -m gruyere._dryrun main REQUEST`. What runs where:

- `main` (that process, which imports no torch): which run comes when, the verdict, the answer
  (`report`, `text`, `page`).
- `worker` (a process a run): the program as python itself would run it, on the stand-in GPU.
  `known` answers for the device, `stops` ends it, `settings` keeps it to the run's allocator.
  A plain run has one allocator and is only measured, as `_bench.script` does it. An analysed run
  has torch's own allocator with its history on, and `looks` at the program's modules, optimisers
  and reads beside it; `live` makes of these what was live at the peak, and `trust` compares two.

What an analysed run sees is a property of the program, whichever allocator serves it; that looking
changed nothing is checked by its peak, which must be that of the plain runs.
"""
