"""The self-check: every worker of a job runs it in place of the job's script.

`python -m raylaunch.worker.selfcheck` under `raylaunch check`, or under torchrun.
"""
