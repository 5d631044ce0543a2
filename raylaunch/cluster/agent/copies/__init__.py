"""Copies of the commits of scripts' `State` on other hosts, made by the agents in the background.

Start with `state_copies`: the agent's part, which copies what its ranks have committed to the agent of the next host,
and fetches what its node lacks when an attempt begins. The memory itself, what agents connect to, and how a part goes
over a connection, is in `raylaunch/node/state`.
"""
