"""The state machine of a run: `Machine.handle(event)` returns the actions that follow.

`machine` says which function handles an event; each is `(run, event) -> actions`, and they call each other only in this
order:

    machine -> deadlines, requests, peers, workers -> nodes -> saving -> transitions -> run_state

Read `events_and_actions` first, then `state` (the phases and the world), `run_state` (`Run`: all that the functions
read and change), and `transitions` and `saving`, by which one phase follows another. `nodes`, `workers`,
`requests`, `peers` and `deadlines` are about one kind of event each. `membership` chooses the nodes of a world.
`commits` and `restoring` choose the commit that a world restores. `restart_policy` remembers failures: how many
restarts are left, which hosts are excluded, and how long a script that crashes in a loop has to wait.
"""
