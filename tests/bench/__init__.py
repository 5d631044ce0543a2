"""raylaunch and torchrun side by side, in one run on one machine.

`python -m tests.bench [restart|cold|memory]` prints one table and writes `bench.json`. The contenders take turns, so
that both meet the same machine; absolute times move with it, and the ratios are what counts.

Every bench runs `unchanged.py`, a script that knows of neither launcher and writes down when it came past what.
"""
