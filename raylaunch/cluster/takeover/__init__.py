"""The takeover of a detached run: a new driver continues it after the process of the last driver has ended.

`detached_driver` is a driver that sends a copy of its state to agents with its orders, and that can start from such a
copy (`driver_state`). `succession` finds the newest copy and builds the driver and its fleet from it. `state_key`
encrypts the copies. The agents' part is in `raylaunch.cluster.succession`.
"""
