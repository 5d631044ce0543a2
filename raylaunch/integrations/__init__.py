"""Callbacks and helpers for libraries that train: what a script would otherwise copy from the documentation.

`lightning`, `transformers` and `accelerate` connect these libraries with `raylaunch.worker`: with its `State`, and with
checkpoints on request. Each module imports its library, and only a script that uses it imports the module. `data` has a
loader whose position can be part of a `State`, and from which any number of ranks can go on. All of this could be code
of a script: it uses what `raylaunch.worker` offers to everybody, and nothing else of raylaunch.
"""
