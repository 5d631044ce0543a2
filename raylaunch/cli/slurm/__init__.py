"""Jobs on Slurm: the batch script that `raylaunch slurm` writes, and the program that it starts on each node.

Read `batch_script.py` first. The script starts `node_program.py` by `srun`, which starts Ray there; on the first node
it also runs the job, as a person would: by `python -m raylaunch`.
"""
