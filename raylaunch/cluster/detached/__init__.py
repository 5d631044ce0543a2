"""Runs whose driver is no command: nothing of them depends on the process that started them.

`detached_run` has what the driver is given, and what it tells the command that started it. On a cluster the driver is
an actor (`driver_actor`); without one it is a process of `raylaunch.cli.detached`.
"""
