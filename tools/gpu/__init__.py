"""`make gpu`: runs all tests that need a GPU on a machine with one, and writes down what it saw.

`__main__` looks for the GPU, `environment` makes a Python environment from the wheels of a bundle, `steps` runs the
test files of `tests/gpu` one after the other, each for a limited time, and `results` writes gpu.json and the table.
`bundle` packs what a machine without a network needs.
"""
