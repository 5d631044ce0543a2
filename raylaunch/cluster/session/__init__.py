"""The place of a run: a connection to a Ray cluster, or this machine without Ray.

Read `session_base` first: a session lists the nodes for the plan and makes the fleet. `run` opens one. `discovery`
finds the cluster that this machine belongs to. `local_session` needs no Ray, and `ray_session` connects to a cluster or
starts a Ray. Its connection outlives the run as long as agents are idle.
"""
