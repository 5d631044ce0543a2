"""What the driver finds out about workers and nodes by asking them: what workers do, and which nodes reach each other.

Read `hang_probe` first: a probe sends an order to each node and collects the answers until a deadline. `peer_check` has
nodes connect to each other after a failure that looks like a broken network. The driver decides when to probe, and
makes events of what comes out.
"""
