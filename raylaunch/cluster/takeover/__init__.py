"""The takeover of a detached run: a new driver continues it after the process of the last driver has ended.

`fenced_leadership` is what the ordinary driver has besides in a detached run: it sends a ledger (`ledger`) to agents
with its orders. `succession` finds the newest ledger, and builds the driver and its fleet from it. The part of the
agents is in `raylaunch.cluster.succession`.
"""
