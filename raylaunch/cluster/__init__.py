"""A run on a cluster: connect, place agents, drive the run to its end. The only room that knows Ray.

Read `run` first: `run_job` prepares, executes and reports a run. A `session` finds the nodes and starts a `fleet` of
agents, one on each node. The `driver` passes what the fleet reports to the core's machine as events, and what the
machine decides back to the fleet as orders (`fleet_api`). Each `agent` runs its node's supervisor. `capability` is the
seam on which `raylaunch.capabilities` sits. `local` is this machine as a cluster of one, `control` answers what other
processes ask of the run, and `ray_api` is everything that needs Ray's private API or its errors. `named_resources`
names what a detached run has in the cluster.
"""
