"""What a run can do besides starting, supervising, restarting and resizing: one package for each capability.

The seam between the kernel and a capability is `raylaunch/cluster/capability.py`: read it first. The modules of a
capability are named after where they run, `driver` and `agent`, which also has what the two tell each other, unless
`sections` has it. The kernel imports none of them: `raylaunch/cluster/run.py` makes the list of those that a run has.
"""
