"""The agents of a run: which are wanted, where they are placed, and how they are started, reached and stopped.

Read `allocator` first: it compares the nodes that are wanted with the slots that exist, and emits requests, slowed down
by `Backoff`. `ray_fleet` and `local_fleet` carry its requests out, with Ray or on this machine, and report to the
driver. `agent_reuse` finds agents that an earlier run left idle (`keep_warm`), and leaves its own.
"""
