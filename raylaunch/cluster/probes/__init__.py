"""What the driver finds out about workers by asking them what they do.

Read `stack_probe` first: a probe sends an order to each node and collects the answers until a deadline. `hang_probe`
does so once or several times. The driver decides when to probe, and makes events of what comes out.
"""
