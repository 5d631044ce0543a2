"""Finds nodes that cannot reach each other, though the driver reaches all of them: the check of peers.

Read `driver` first: it decides when there is a check, and makes an event of what it finds. `agent` listens and connects
on each node. What follows from the event, the machine decides.
"""
