"""The state machine of a run: `Machine.handle(event)` returns the actions that follow.

Read `events` and `actions` first, then `state` (the phases), `transitions` (what each transition does) and `machine`
(which transition an event leads to). `membership` holds the nodes and chooses those of the next world.
`restart_budget` and `host_health` remember failures: how many restarts are left, which hosts are excluded, and how
long a script that crashes in a loop has to wait.
"""
