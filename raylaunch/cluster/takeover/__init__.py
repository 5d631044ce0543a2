"""The takeover of a detached run: a new driver continues it after the process of the last driver has ended.

`succession` has what the ordinary driver has besides in a detached run (`FencedLeadership`), which sends a ledger
(`ledger`) to agents with its orders. It finds the newest ledger, and builds the driver and its fleet from it. The part
of the agents is in `raylaunch.cluster.succession`.
"""
