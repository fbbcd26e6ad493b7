"""`gruyere dryrun`: finds out, without a GPU, whether a program fits on one and where its memory
goes.

The command `gruyere` declares the options, finds the interpreter, and runs
`python -m gruyere._dryrun main REQUEST`. The request is the arguments as typed, with the launch
line split into the interpreter's options, the script or module, and its arguments. The parts:

- `main` (in that process, which does not import torch): reads the arguments (`gpus`, `sweep`); the
  order of the runs, the verdict, and the answer (`report`, `text`, `page`).
- `worker` (one process per run): runs the program as python itself would, on the stand-in GPU.
  `answers` answers questions to the device, `stops` ends the program, `settings` enforces the run's
  allocator. A plain run has one allocator and is only measured, as by `_bench.script`. An analysed
  run uses torch's own allocator with its history on, while `hooks` watch the program's modules,
  optimisers and reads; from both, `live` determines what was live at the peak. `trust` compares two
  analysed runs.

The results of an analysed run are properties of the program and do not depend on the allocator. Its
peak must equal that of the plain runs, which shows that the hooks changed nothing.
"""
