"""The state machine of a run: `Machine.handle(event)` returns the actions that follow.

Read `events_and_actions` first, then `state` (the phases, and the nodes of which worlds are made), `transitions` (what
each transition does) and `machine` (which transition an event leads to). `node_loss` is the part of the machine for
nodes that are lost or given up. `commits` and `restoring` choose the commit that a world restores. `restart_policy`
remembers failures: how many restarts are left, which hosts are excluded, and how long a script that crashes in a loop
has to wait.
"""
