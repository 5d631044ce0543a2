"""The takeover of a detached run: a new driver continues it after the process of the last driver has ended.

`detached_driver` is a driver that sends a ledger to agents with its orders (`ledger`), and that can go on from one.
`succession` finds the newest ledger, and builds the driver and its fleet from it. The agents' part is in
`raylaunch.cluster.succession`.
"""
