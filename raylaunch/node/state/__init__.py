"""Memory that holds the commits of workers' `State`, and outlives the workers, the fork server and the agent.

Start with `state_memory`: the agent's part, which hands out memory files to workers, and says which commits they hold.
The subreaper has duplicates of their descriptors (`fd_store`) for the case that the agent is killed (`inheritance`).
Other agents get parts by `transfer` from a `PartServer`: the agent's or, when it was killed, its subreaper's.
The layout of a file is in `raylaunch/worker/state/commit_buffer.py`.
"""
