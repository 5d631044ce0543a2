"""`make examples`: each script of `examples/` survives the death of a rank, and ends with the result of one that had none.

`python -m tools.examples [NAMES]` runs each example three times with two ranks: under torchrun, where nobody dies; under
raylaunch, and under torchrun with restarts, where rank 1 is killed as soon as the script has printed a certain line and,
if it goes on from files, those are there. `example.py` says what each promises, `runs.py` runs and kills.
"""
