"""Copies of the commits of scripts' `State` and of their files on other hosts, made by the agents in the background.

Start with `driver`: to whom each node copies. `agent` copies what its ranks have committed to the agent of the next
host, and fetches what its node lacks when an attempt begins; `file_copies` does so for files. `sections` has what the
two tell each other. `last_checkpoint` waits, at the end of a run, until it is on disk. The memory itself, what agents
connect to, and how a part goes over a connection, is in `raylaunch/node/state`.
"""
