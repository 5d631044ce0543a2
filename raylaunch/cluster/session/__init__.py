"""The place of a run: a connection to a Ray cluster, or this machine without Ray.

Read `connect` first: it finds the cluster, with `discovery`, and opens a session, the interface in `session_base`.
`local_session` needs no Ray, and `ray_session` connects to a cluster or starts a Ray; a `shared_connection` outlives
the run as long as agents are idle. A session lists the nodes for the plan and makes the fleet.
"""
