"""The driver of a run: the shell around the core's machine, in the process that the user started.

Read `driver` first: its loop takes the next report of the fleet, turns it into events, has the machine handle them, and
gives the actions to the `executor`, which sends orders to nodes. `node_registry` knows which nodes are alive.
`progress_monitor` follows the workers by their heartbeats. What happens goes to an `observer` and to the `run_folder`;
`signals` brings in the user's signals, and `Driver.call` what other threads request.
"""
