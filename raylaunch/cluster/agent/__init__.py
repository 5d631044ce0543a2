"""The agent: the part of a run on each node, in a Ray actor or, without Ray, in a thread of the driver's process.

Start with `agent`: orders go through `Agent.handle` to the supervisor (`node/supervisor`); node events and output wait
in its `PendingReport` until the driver's pending call of `next_report` takes them. `ray_actor` is the same as a Ray
actor. `lease` and `link` are the two ways in which agent and driver notice that the other is gone.
`agent_session` records which driver is in command (the one with the highest epoch, a fencing token), the newest goal
that the agent was shown, and the ledger of a detached run.
"""
