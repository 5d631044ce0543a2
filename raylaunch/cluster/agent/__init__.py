"""The agent: the part of a run on each node, in a Ray actor or, without Ray, in a thread of the driver's process.

Start with `agent`: orders go through `Agent.handle` to the supervisor (`node/supervisor`); node events and output wait
in its `PendingReport` until the driver's pending call of `next_report` takes them. `ray_actor` is the same as a Ray
actor. `lease` and `link` are the two ways in which agent and driver notice that the other is gone.

Five things end a node. Each ends the processes below the agent too, since they watch their parents and the lease.

- `close`: the driver gives up the node, or the run is over. The agent ends all, and frees the memory of `State`.
- `leave`: as above, but the subreaper keeps that memory for the next agent on the host.
- The link: its end tells either side that the other is gone; the driver may also shut it down.
- The lease: the node has not heard of its driver for too long.
- Ray: it kills the actor, when the driver says so, or when the driver, the raylet or the host is gone.

`agent_session` records which driver is in command (the one with the highest epoch, a fencing token), the newest goal
that the agent was shown, and the ledger of a detached run.
"""
