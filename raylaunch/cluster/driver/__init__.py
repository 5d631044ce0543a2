"""The driver of a run: the shell around the core's machine, in the process that the user started.

Read `driver` first: its loop takes the next report of the fleet, turns it into events, has the machine handle them, and
gives the actions to the `executor`, which sends orders to nodes. `node_registry` knows which nodes are alive.
`progress_monitor` follows the workers by their heartbeats. What happens goes to an `observer` and to the `run_folder`;
`signals` brings in the user's signals, and `Driver.inbox` what other threads request.

The driver of a detached run on a cluster writes a `ledger` for the next one, which starts the same loop from it.
`succession` has what such a driver does besides: it sends the ledger to agents with its orders (`FencedLeadership`), or
finds the newest one. `interim_keeper` is an actor that has the ledger while no agent has it. `folder_fence` keeps a
driver that was replaced from writing into the run folder.
"""
