"""The state machine of a run: `Machine.handle(event)` returns the actions that follow.

`machine` says which function handles an event; each is `(run, event) -> actions`, and they call each other only in this
order:

    machine -> requests, peers, workers -> nodes -> saving -> transitions -> run_state

Read `events_and_actions` first, then `state` (the phases and the world), `run_state` (`Run`: all that the functions
read and change; its `Membership` chooses the nodes of a world), and `transitions` and `saving`, by which one phase
follows another. `nodes`, `workers`, `requests` and `peers` are about one kind of event each; what time brings is in
`machine`. `commits` and `resuming` are about what a world, or another driver, goes on from.
`restart_policy` remembers failures: how many restarts are left, which hosts are excluded, and how long a script that
crashes in a loop has to wait.
"""
