"""Drains the hosts that a cloud announces it will take away: `preemption_notices`.

Read `agent` first: it asks the cloud's metadata server of its machine. `driver` makes the event of a drain of what the
agents tell.
"""
