"""Runs in the background: `raylaunch -d`, and `start(..., detach=True)` and `attach` in Python.

`detach` starts the driver, as an actor of the cluster or as a process of this machine, and waits until the workers have
started. In the driver's process `background_run` runs the job. `raylaunch attach` itself is a command on runs, and in
`runs`.
"""
