"""Programs for those who work on raylaunch, each started by a target of the Makefile.

`bench` measures against torchrun and Ray Train, `chaos` trains under random faults, `compat` tries other versions of
Python, Ray and torch, `gpu` runs what needs a GPU, `docs` writes the generated tables of the documentation, `fuzz`
draws new cases for all properties, `examples` kills a rank of each example, and `dist` tries a wheel. They start clusters and hosts with the fixtures of `tests`.
"""
