"""raylaunch, torchrun and Ray Train side by side, in one run on one machine.

`python -m tools.bench [NAME ...]` prints one table and writes `bench.json`. The contenders take turns, so that all
meet the same machine; absolute times move with it, and the ratios are what counts.

A bench is a module with `measure(cluster, scratch) -> Outcome`, and says in its docstring what it measures, from which
event to which, and with whose settings.
"""
