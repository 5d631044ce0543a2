"""Memory that holds the commits of workers' `State`, and outlives the workers, the fork server and the agent.

Start with `state_memory`: the agent's part, which hands out memory files to workers, and says which commits they hold.
`fd_store` is a process that keeps duplicates of their descriptors for the case that the agent is killed; agents use it
through `fd_store_client`. Other agents get parts by `part_transfer`: from the agent or, when that was killed, from the
state keeper (`orphaned_parts`). The layout of a file is in `raylaunch/worker/state/commit_buffer.py`.
"""
