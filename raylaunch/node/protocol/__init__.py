"""What crosses between driver, supervisor and fork server: dataclasses, and the ways in which they travel.

Start with `node_goal`, the driver's orders, and `node_status`, the node's events. `forkserver_messages` are what the
supervisor and its fork server send each other over a socket pair (`wire`). Workers are started from a `node_spec`. What
the fork server imports ahead is an `import_manifest`.
"""
